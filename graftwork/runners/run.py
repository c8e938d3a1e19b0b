"""Runs a plan folder with plain onnxruntime and numpy: one sequence, greedy. To be ported.

plan.schema.json describes plan.json. One cycle serves all kinds: draft, step, verify, commit.

    python run.py FOLDER 1,2,3 32        # a prompt's token ids, and how many more
"""

import json
import pathlib
import sys

import numpy as np
import onnxruntime as ort

KNOWN = {
    "step": ["whole", "fused", "prefilled", "segments"],
    **{"draft": ["none", "suffix", "heads", "fused", "exit"], "cache": ["all"], "source": ["none"]},
    **{"tree": ["chain", "static"], "verify": ["lossless"], "depth": ["full", "linear", "decay"]},
}
DTYPES = {"f32": np.float32, "f16": np.float16, "i64": np.int64, "u8": np.uint8}


def chain(tokens):
    """A draft whose nodes follow one another: tokens, and each one's parent (-1: the text)."""
    return list(tokens), list(range(-1, len(tokens) - 1))


class Runner:
    def __init__(self, folder, threads=1, share=False):
        self.folder = pathlib.Path(folder)
        self.said = json.loads((self.folder / "plan.json").read_text(encoding="utf-8"))
        if self.said.get("format") != "graftwork-plan" or self.said["version"] != 1:
            raise SystemExit("expected a plan.json of format graftwork-plan, version 1")
        for slot, kind in (entry.split(":") for entry in self.said["requires"]):
            if kind not in KNOWN.get(slot, []):
                raise SystemExit(f"this runner does not know {slot}={kind}; {self.said['instead']}")
        self.model, self.functions = self.said["model"], self.said["functions"]
        self.plan, self.parts = self.said["plan"], self.said["step"]["decode"]
        self.layers = [self.functions[name]["layers"] for name in self.parts]
        self.draft = getattr(self, "draft_" + self.plan["draft"]["kind"])
        self.levels = min(self.plan["tree"].get("depth") or 99, self.plan["draft"].get("levels", 0))
        paths = self.plan["tree"].get("paths") or [[0] * (d + 1) for d in range(self.levels)]
        self.paths = list(map(tuple, paths))
        self.options = options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        options.enable_cpu_mem_arena = not share  # nothing is kept to be used again
        options.add_session_config_entry("session.disable_prepacking", str(int(share)))
        self.sessions, self.states, self.steps = {}, {}, 0

    def session(self, name, variant):
        """A function's session in a variant, what plan.json says of it, and which one it is."""
        said = self.functions[name]["variants"]
        variant = next(kind for kind in (variant, "chain", "batch") if kind in said)
        if (name, variant) not in self.sessions:
            path, where = self.folder / said[variant]["file"], ["CPUExecutionProvider"]
            self.sessions[name, variant] = ort.InferenceSession(path, self.options, where)
        return self.sessions[name, variant], said[variant], variant

    def reserve(self, rows):
        """New state buffers of `rows` rows: (array, the same for onnxruntime, axis of rows)."""
        for name, state in self.said["states"].items():
            dtype, dims = state["type"].rstrip("]").split("[")
            dims, sizes = dims.split(","), {"B": 1, state["rows"]: rows}
            array = np.zeros([sizes.get(d) or int(d) for d in dims], DTYPES[dtype])
            axis = dims.index(state["rows"]) if state["rows"] else None
            self.states[name] = array, ort.OrtValue.ortvalue_from_numpy(array), axis

    def call(self, name, inputs, fetch, past=0, ancestors=None):
        """Outputs of a function behind `past` rows; its states change in place."""
        width = next(iter(inputs.values())).shape[1]
        twice = width == 1 and self.functions[name]["lone_token"] == "twice"
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
        binding, fetched = session.io_binding(), [k for k in fetch if k in said["outputs"]]
        for key in fetched:
            binding.bind_output(key, "cpu")
        for key in said["inputs"].keys() - self.states.keys():
            binding.bind_cpu_input(key, np.ascontiguousarray(given[key]))
        for key, (_, value, _) in self.states.items():
            if key in said["inputs"]:
                binding.bind_ortvalue_input(key, value)
            if key + ".next" in said["outputs"]:
                binding.bind_ortvalue_output(key + ".next", value)
        session.run_with_iobinding(binding)
        made = [value.numpy() for value in binding.get_outputs()[: len(fetched)]]
        made = [value[:, :1] if twice and value.shape[1] == 2 else value for value in made]
        return dict(zip(fetched, made, strict=True))

    def step(self, functions, tokens, past, fetch, chosen=None, tree=None):
        """Run the functions of a step on tokens behind `past` rows. chosen: whose logits count."""
        width = len(tokens)
        depths = np.arange(width) if tree is None else tree.sum(1) - 1
        chosen = np.arange(width) if chosen is None else np.array(chosen)
        inputs = {"tokens": np.array([tokens]), "positions": past + depths[None]}
        inputs["select"], mask, outputs = chosen[None], None if tree is None else tree[None], {}
        for name in functions:
            outputs |= self.call(name, inputs, fetch, past, mask)
        return outputs

    # Drafts behind a text, for `room` tokens at most: see `chain`.

    def draft_none(self, text, room):
        return chain([])

    def draft_suffix(self, text, room):
        """Copy what followed the most recent of the longest earlier matches of the text's end."""
        said, text, end = self.plan["draft"], np.array(text), np.arange(1, len(text))
        size, same = np.zeros(len(end), int), np.ones(len(end), bool)
        for back in range(min(said["longest"], len(end))):
            same &= (end > back) & (text[end - 1 - back] == text[-1 - back])
            size += same
        if not len(end) or size.max() < said["shortest"]:
            return chain([])
        copied = text[len(end) - size[::-1].argmax() :]
        return chain(np.resize(copied, min(room, said["tokens"])).tolist())

    def draft_heads(self, text, room):
        """The nodes of the plan's tree: the candidate of that rank of each depth's head."""
        hidden = {"hidden": self.out["hidden"][:, self.column : self.column + 1]}
        said = self.plan["draft"]
        made = self.call(said["function"], hidden, ["draft_tokens"])["draft_tokens"][0, 0]
        paths = [path for path in self.paths if len(path) <= min(room, len(made))]
        place = {(): -1} | {path: index for index, path in enumerate(paths)}
        return [int(made[len(p) - 1, p[-1]]) for p in paths], [place[p[:-1]] for p in paths]

    def draft_fused(self, text, room):
        """The step has made it, if it follows the last token that was kept."""
        made = self.out["drafted"][0].tolist()
        return chain(made[1:][:room] if made[0] == self.column else [])

    def draft_exit(self, text, room):
        """The first layers draft token by token; verification goes on where they stopped."""
        said, tokens, count = self.plan["draft"], [text[-1]], max(min(room, self.levels), 0)
        self.done = 1 + int(np.searchsorted(np.cumsum(self.layers), said["exit"]))
        for place in range(len(text) - 1, len(text) + count):
            out = self.step(self.parts[: self.done], tokens[-1:], place, [said["output"]])
            out = self.call(said["function"], {"hidden": out[said["output"]]}, ["draft_tokens"])
            tokens.append(int(out["draft_tokens"].flat[0]))
        return chain(tokens[1:-1])

    def depth(self, place):
        """The functions of a step: all, or the first and as many of the last as layers may run."""
        said, sizes = self.plan["depth"], self.layers[:-1]
        if said["kind"] == "full":
            return self.parts[self.done :]
        if said["kind"] == "decay":
            budget = max(int(sum(sizes) * said["alpha"] ** place), said["least"])
        else:
            most = said["most"] or sum(sizes)
            budget = int(most - (most - said["least"]) * min(place / said["tokens"], 1.0))
        last = sum(np.cumsum(sizes[:0:-1]) <= budget - sizes[0])
        return [self.parts[0], *self.parts[len(self.parts) - 1 - last :]]

    def generate(self, prompt, new, eos=None):
        """The tokens after a prompt: `new`, or up to one of `eos`, or to the context's end."""
        eos, context = self.model["eos"] if eos is None else eos, self.model["context"]
        if not 0 < len(prompt) < context:
            raise SystemExit(f"expected a prompt of 1 to {context - 1} tokens, got {len(prompt)}")
        text, limit, self.steps = list(prompt), min(len(prompt) + new, context), 0
        self.reserve(limit + self.said["overhang"])
        fetch, self.column = ["argmax", "drafted", "hidden"], len(text) - 1
        self.out = self.step(self.said["step"]["prompt"], text, 0, fetch, [self.column])
        tokens = [int(self.out["argmax"][0, 0])]
        while True:
            text += tokens
            ends = [i for i in range(len(prompt), len(text)) if text[i] in eos or i + 1 == limit]
            if ends:
                return text[len(prompt) : ends[0] + 1]
            self.done, past = 0, len(text) - 1
            nodes, parents = self.draft(text, limit - len(text) - 1)
            tree = np.eye(1 + len(nodes), dtype=np.bool_)
            for node, parent in enumerate(parents, 1):
                tree[node] |= tree[parent + 1]
            straight = (nodes, parents) == chain(nodes)
            functions, shape = self.depth(past - len(prompt)), None if straight else tree
            self.out = self.step(functions, [text[-1], *nodes], past, fetch, None, shape)
            best, path = self.out["argmax"][0].tolist(), [0]
            for node, parent in enumerate(parents, 1):
                if parent + 1 == path[-1] and nodes[node - 1] == best[parent + 1]:
                    path.append(node)
            for array, _, axis in self.states.values() if not straight else ():
                if axis is not None:  # the accepted rows move together
                    rows = np.moveaxis(array, axis, 0)[past:]
                    rows[: len(path)] = rows[path]
            tokens, self.column, self.steps = [best[n] for n in path], path[-1], self.steps + 1


if __name__ == "__main__":
    folder, ids, count = sys.argv[1:]
    print(*Runner(folder).generate([int(token) for token in ids.split(",")], int(count)), sep=",")
