"""What run.py stands on: the functions of a plan folder, and the states that they share.

Plain onnxruntime and numpy, one sequence. plan.schema.json describes plan.json. On Linux what
sessions keep of the weights in memory of their own is put into pages of 2 MB, where the system
gives them to whom asks: every step reads all of it, and pages of 4 KB take time to be looked up.
"""

import contextlib
import ctypes
import hashlib
import json
import mmap
import pathlib
import re

import numpy as np
import onnxruntime as ort

KNOWN = {
    "step": ["whole", "fused", "prefilled", "segments"],
    **{"draft": ["none", "suffix", "heads", "fused", "exit"], "tree": ["chain", "static"]},
    **{"verify": ["lossless"], "depth": ["full", "linear", "decay"], "cache": ["all"]},
    **{"source": ["none", "encoded"], "states": ["recurrent"]},
}
DTYPES = {"f32": "f4", "f16": "f2", "i64": "i8", "u8": "u1", "bool": "?"}


PAGE = 2 << 20


def private_pages():
    """Where the process has pages of 2 MB of memory that is no file's; nowhere but on Linux."""
    found, maps = set(), pathlib.Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if hasattr(mmap, "MADV_HUGEPAGE") else []:
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found |= set(range(-(-start // PAGE) * PAGE, end - PAGE + 1, PAGE))
    return found


def make_large(pages):
    """Have Linux make pages of 2 MB one each: advice, which it may not take."""
    for page in pages:
        for advice in (mmap.MADV_HUGEPAGE, 25):  # when it is written; now (MADV_COLLAPSE)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), advice)


def dims_of(type):
    """The dims in a type such as f32[B,T,64]."""
    return type.rstrip("]").split("[")[1].split(",")


@contextlib.contextmanager
def refusing(folder):
    """What a folder cannot do that is not what its runner expects ends with one line."""
    try:
        yield
    except Exception as error:  # onnxruntime's own among them
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise SystemExit(f"{folder} cannot be run: {said}; export it again") from error


def read_plan(path):
    """What plan.json says, if it is what was written and this runner knows all of it."""
    with refusing(path):
        data = path.read_bytes()
        said = json.loads(data)
        if said.get("format") != "graftwork-plan" or said["version"] != 1:
            raise SystemExit("expected a plan.json of format graftwork-plan, version 1")
        for slot, kind in (entry.split(":") for entry in said["requires"]):
            if kind not in KNOWN.get(slot, []):
                raise SystemExit(f"this runner does not know {slot}={kind}; {said['instead']}")
        # The hash of a file in which zeros stand for it.
        own = said["sha256"].encode()
        if hashlib.sha256(data.replace(own, b"0" * 64, 1)).hexdigest().encode() != own:
            raise SystemExit(f"{path} is damaged: its sha256 is another; export it again")
        for function in said["functions"].values():
            for variant in function["variants"].values():
                if not re.fullmatch(r"[0-9]+\.[a-z]+\.onnx", variant["file"]):
                    raise SystemExit(f"{path} names {variant['file']!r}, no file of this folder")
    return said


class Functions:
    def __init__(self, folder, threads=1, share=False):
        self.folder = pathlib.Path(folder)
        self.said = read_plan(self.folder / "plan.json")
        self.options = options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        options.enable_cpu_mem_arena = not share  # nothing is kept to be used again
        options.add_session_config_entry("session.disable_prepacking", str(int(share)))
        self.sessions, self.states, self.bindings = {}, {}, {}

    def session(self, name, variant):
        """A function's session in a variant, what plan.json says of it, and which one it is."""
        said = self.said["functions"][name]["variants"]
        variant = next(kind for kind in (variant, "chain", "batch") if kind in said)
        if (name, variant) not in self.sessions:
            path, where = self.folder / said[variant]["file"], ["CPUExecutionProvider"]
            before = private_pages()
            self.sessions[name, variant] = ort.InferenceSession(path, self.options, where)
            make_large(private_pages() - before)
        return self.sessions[name, variant], said[variant], variant

    def reserve(self, rows, source):
        """New states, with `rows` rows for a text and `source` for what it is written from: where
        each is read and where its next value is written, as (array, the same for onnxruntime)."""
        log = max(self.said["step"]["most_columns"] - 1, 1)  # a step's first token is certain
        sizes = {"B": 1, "E": source, "W": log}
        self.bindings = {}
        for name, state in self.said["states"].items():
            dtype = DTYPES[state["type"].split("[")[0]]
            shape = [int(d) if d.isdigit() else sizes.get(d, rows) for d in dims_of(state["type"])]
            made = [np.zeros(shape, dtype) for _ in range(1 if state["in_place"] else 2)]
            self.states[name] = [(array, ort.OrtValue.ortvalue_from_numpy(array)) for array in made]

    def call(self, name, inputs, fetch, past=0, ancestors=None):
        """Outputs of a function behind `past` rows; its states change."""
        width = next(iter(inputs.values())).shape[1]
        twice = width == 1 and self.said["functions"][name]["lone_token"] == "twice"
        if twice:  # kernels add a lone token up in another order
            inputs = {
                k: v.repeat(2, 1) if v.ndim > 1 and k != "select" else v for k, v in inputs.items()
            }
            width = 2
        session, said, variant = self.session(name, "chain" if ancestors is None else "tree")
        given = inputs | {
            "past": np.array([past]),
            "ancestors": np.tri(width, dtype=np.bool_)[None] if ancestors is None else ancestors,
            "seqlens": np.array([past + width - 1], np.int32),
            "total": np.array(past + width + (variant == "tree" and past == 0), np.int32),
        }
        fetched = [key for key in fetch if key in said["outputs"]]
        which = (name, variant, *fetched)
        new = which not in self.bindings
        binding = self.bindings[which] = session.io_binding() if new else self.bindings[which]
        for key in fetched:  # anew each time: else the last results' memory would be written
            binding.bind_output(key, "cpu")
        for key in said["inputs"].keys() - self.states.keys():
            binding.bind_cpu_input(key, np.ascontiguousarray(given[key]))
        written = [key for key in self.states if key + ".next" in said["outputs"]]
        moved = {key for key, both in self.states.items() if new or len(both) > 1}
        for key in moved & said["inputs"].keys():
            binding.bind_ortvalue_input(key, self.states[key][0][1])
        for key in moved & set(written):
            binding.bind_ortvalue_output(key + ".next", self.states[key][-1][1])
        session.run_with_iobinding(binding)
        for key in written:
            self.states[key].reverse()
        made = [value.numpy() for value in binding.get_outputs()[: len(fetched)]]
        made = [value[:, :1] if twice and value.shape[1] == 2 else value for value in made]
        return dict(zip(fetched, made, strict=True))

    def encode(self, name, source, most):
        """Have the states hold what is made of a source: token ids, or features (`most` rows)."""
        said = self.session(name, "chain")[1]["inputs"]
        if "features" in said:
            shape, rows = [1, *map(int, dims_of(said["features"])[1:])], most
            first = {"features": np.reshape(np.asarray(source, np.float32), shape)}
        else:
            rows = len(source)
            first = {"tokens": np.array([source]), "positions": np.arange(rows)[None]}
        self.call(name, first | {"lengths": np.array([rows])}, [])

    def commit(self, past, path):
        """Accepted rows of the last step move together; a log begins behind its first one."""
        for name, state in self.said["states"].items():
            if state["rows"] in (None, "E"):
                continue
            axis, logged = dims_of(state["type"]).index(state["rows"]), state["rows"] == "W"
            rows = np.moveaxis(self.states[name][0][0], axis, 0)[0 if logged else past :]
            kept = np.array(path[1:], int) - 1 if logged else path
            rows[: len(kept)] = rows[kept]
