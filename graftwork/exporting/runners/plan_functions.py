"""Functions of a plan folder and their states, for run.py: onnxruntime and numpy, one sequence.

plan.schema.json describes plan.json. On Linux, sessions' private copies of weights are put into
huge pages (2 MB) if the system allows it: every step reads all weights, and 4 KB pages cost TLB
misses.
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
    """Addresses of 2 MB blocks of private memory of the process; none except on Linux."""
    found, maps = set(), pathlib.Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if hasattr(mmap, "MADV_HUGEPAGE") else []:
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found |= set(range(-(-start // PAGE) * PAGE, end - PAGE + 1, PAGE))
    return found


def make_large(pages):
    """Advise Linux to back blocks by huge pages."""
    for page in pages:
        for advice in (mmap.MADV_HUGEPAGE, 25):  # on write; now (MADV_COLLAPSE)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), advice)


def dims_of(type):
    """The dims of a type such as f32[B,T,64]."""
    return type.rstrip("]").split("[")[1].split(",")


@contextlib.contextmanager
def refusing(folder):
    """Turn exceptions into an exit with a one-line message."""
    try:
        yield
    except Exception as error:  # onnxruntime has its own types
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise SystemExit(f"{folder} cannot be run: {reason}; export it again") from error


def read_plan(path):
    """Read and check plan.json."""
    with refusing(path):
        data = path.read_bytes()
        plan = json.loads(data)
        if plan.get("format") != "graftwork-plan" or plan["version"] != 1:
            raise SystemExit("expected a plan.json of format graftwork-plan, version 1")
        for slot, kind in (entry.split(":") for entry in plan["requires"]):
            if kind not in KNOWN.get(slot, []):
                raise SystemExit(f"this runner does not know {slot}={kind}; {plan['instead']}")
        # The hash is of the file with zeros in its place.
        own = plan["sha256"].encode()
        if hashlib.sha256(data.replace(own, b"0" * 64, 1)).hexdigest().encode() != own:
            raise SystemExit(f"{path} is damaged: its sha256 is another; export it again")
        for function in plan["functions"].values():
            for variant in function["variants"].values():
                if not re.fullmatch(r"[0-9]+\.[a-z]+\.onnx", variant["file"]):
                    raise SystemExit(f"{path} names {variant['file']!r}, no file of this folder")
    return plan


class Functions:
    def __init__(self, folder, threads=1, share=False):
        self.folder = pathlib.Path(folder)
        self.plan = read_plan(self.folder / "plan.json")
        self.options = options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        options.enable_cpu_mem_arena = not share  # no arena per session
        options.add_session_config_entry("session.disable_prepacking", str(int(share)))
        self.sessions, self.states, self.bindings = {}, {}, {}

    def session(self, name, variant):
        """A function's session, its entry in plan.json, and its variant."""
        variants = self.plan["functions"][name]["variants"]
        variant = next(kind for kind in (variant, "chain", "batch") if kind in variants)
        if (name, variant) not in self.sessions:
            path, where = self.folder / variants[variant]["file"], ["CPUExecutionProvider"]
            before = private_pages()
            self.sessions[name, variant] = ort.InferenceSession(path, self.options, where)
            make_large(private_pages() - before)
        return self.sessions[name, variant], variants[variant], variant

    def reserve(self, rows, source):
        """Allocate states with `rows` rows for a text and `source` rows for its source: the value
        that is read, and the next one, each as (array, OrtValue)."""
        log = max(self.plan["step"]["most_columns"] - 1, 1)  # a step's first token is final
        sizes = {"B": 1, "E": source, "W": log}
        self.bindings = {}
        for name, state in self.plan["states"].items():
            dtype = DTYPES[state["type"].split("[")[0]]
            shape = [int(d) if d.isdigit() else sizes.get(d, rows) for d in dims_of(state["type"])]
            made = [np.zeros(shape, dtype) for _ in range(1 if state["in_place"] else 2)]
            self.states[name] = [(array, ort.OrtValue.ortvalue_from_numpy(array)) for array in made]

    def call(self, name, inputs, fetch, past=0, ancestors=None):
        """Run a function after `past` rows; updates its states."""
        width = next(iter(inputs.values())).shape[1]
        twice = width == 1 and self.plan["functions"][name]["lone_token"] == "twice"
        if twice:  # kernels for one token sum in another order
            inputs = {
                k: v.repeat(2, 1) if v.ndim > 1 and k != "select" else v for k, v in inputs.items()
            }
            width = 2
        session, entry, variant = self.session(name, "chain" if ancestors is None else "tree")
        given = inputs | {
            "past": np.array([past]),
            "ancestors": np.tri(width, dtype=np.bool_)[None] if ancestors is None else ancestors,
            "seqlens": np.array([past + width - 1], np.int32),
            "total": np.array(past + width + (variant == "tree" and past == 0), np.int32),
        }
        fetched = [key for key in fetch if key in entry["outputs"]]
        which = (name, variant, *fetched)
        new = which not in self.bindings
        binding = self.bindings[which] = session.io_binding() if new else self.bindings[which]
        for key in fetched:  # each time, to get new memory
            binding.bind_output(key, "cpu")
        for key in entry["inputs"].keys() - self.states.keys():
            binding.bind_cpu_input(key, np.ascontiguousarray(given[key]))
        written = [key for key in self.states if key + ".next" in entry["outputs"]]
        moved = {key for key, both in self.states.items() if new or len(both) > 1}
        for key in moved & entry["inputs"].keys():
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
        """Encode a source into the states: token ids, or features (`most` rows)."""
        types = self.session(name, "chain")[1]["inputs"]
        if "features" in types:
            shape, rows = [1, *map(int, dims_of(types["features"])[1:])], most
            first = {"features": np.reshape(np.asarray(source, np.float32), shape)}
        else:
            rows = len(source)
            first = {"tokens": np.array([source]), "positions": np.arange(rows)[None]}
        self.call(name, first | {"lengths": np.array([rows])}, [])

    def commit(self, past, path):
        """Compact the accepted rows of the last step; logs begin after its first row."""
        for name, state in self.plan["states"].items():
            if state["rows"] in (None, "E"):
                continue
            axis, logged = dims_of(state["type"]).index(state["rows"]), state["rows"] == "W"
            rows = np.moveaxis(self.states[name][0][0], axis, 0)[0 if logged else past :]
            kept = np.array(path[1:], int) - 1 if logged else path
            rows[: len(kept)] = rows[kept]
