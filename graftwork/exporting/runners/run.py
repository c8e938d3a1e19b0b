"""Runs a plan folder with onnxruntime and numpy: one sequence, greedy. A reference for ports.

Each cycle: draft, step, verify, commit. plan_functions.py runs the functions.

    python run.py FOLDER 1,2,3 32        # token ids of a prompt or source, number of new tokens
    python run.py FOLDER sound.f32 32    # features of a source, raw float32
"""

import pathlib
import sys

if __name__ == "__main__" and len(sys.argv) != 4:  # before imports that may fail
    asked = not {"-h", "--help"}.isdisjoint(sys.argv)
    print(__doc__.strip(), file=sys.stdout if asked else sys.stderr)
    sys.exit(0 if asked else 2)

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from plan_functions import Functions, refusing


def chain(tokens):
    """A chain draft: tokens, and the parent of each (-1: the text)."""
    return list(tokens), list(range(-1, len(tokens) - 1))


class Runner:
    def __init__(self, folder, threads=1, share=False):
        self.functions = Functions(folder, threads, share)
        plan = self.functions.plan
        self.model, self.plan, self.calls = plan["model"], plan["plan"], plan["step"]
        self.parts, self.steps = self.calls["decode"], 0
        self.layers = [plan["functions"][name]["layers"] for name in self.parts]
        self.draft = getattr(self, "draft_" + self.plan["draft"]["kind"])
        self.levels = min(self.plan["tree"].get("depth") or 99, self.plan["draft"].get("levels", 0))
        self.rules = self.model["generation"]
        paths = self.plan["tree"].get("paths") or [[0] * (d + 1) for d in range(self.levels)]
        self.paths, self.overhang = list(map(tuple, paths)), plan["overhang"]

    def step(self, functions, tokens, past, fetch, chosen=None, tree=None, certain=1):
        """Run the functions of a step on tokens after `past` rows. chosen: columns with logits.
        certain: number of tokens that are final."""
        width = len(tokens)
        depths = np.arange(width) if tree is None else tree.sum(1) - 1
        chosen = np.arange(width) if chosen is None else np.array(chosen)
        inputs = {"tokens": np.array([tokens]), "positions": past + depths[None]}
        inputs |= {"select": chosen[None], "certain": np.array([certain])}
        mask, outputs = None if tree is None else tree[None], {}
        for name in functions:
            outputs |= self.functions.call(name, inputs, fetch, past, mask)
        return outputs

    # Drafts of at most `room` tokens: see `chain`.

    def draft_none(self, text, room):
        return chain([])

    def draft_suffix(self, text, room):
        """Copy the tokens after the most recent of the longest earlier matches of the suffix."""
        record, text = self.plan["draft"], np.array(self.readable + text)
        end = np.arange(1, len(text))
        size, same = np.zeros(len(end), int), np.ones(len(end), bool)
        for back in range(min(record["longest"], len(end))):
            same &= (end > back) & (text[end - 1 - back] == text[-1 - back])
            if not same.any():
                break
            size += same
        if not len(end) or size.max() < record["shortest"]:
            return chain([])
        copied = text[len(end) - size[::-1].argmax() :]
        return chain(np.resize(copied, min(room, record["tokens"])).tolist())

    def draft_heads(self, text, room):
        """The plan's tree, filled with the candidates of each depth's head by rank."""
        hidden = {"hidden": self.out["hidden"][:, self.column : self.column + 1]}
        name = self.plan["draft"]["function"]
        made = self.functions.call(name, hidden, ["draft_tokens"])["draft_tokens"][0, 0]
        paths = [path for path in self.paths if len(path) <= min(room, len(made))]
        place = {(): -1} | {path: index for index, path in enumerate(paths)}
        return [int(made[len(p) - 1, p[-1]]) for p in paths], [place[p[:-1]] for p in paths]

    def draft_fused(self, text, room):
        """Made by the step; valid if it follows the last accepted token."""
        made = self.out["drafted"][0].tolist()
        return chain(made[1:][:room] if made[0] == self.column else [])

    def draft_exit(self, text, room):
        """The first layers draft token by token; verification continues from their states."""
        record, tokens, count = self.plan["draft"], [text[-1]], max(min(room, self.levels), 0)
        self.done = 1 + int(np.searchsorted(np.cumsum(self.layers), record["exit"]))
        for place in range(len(text) - 1, len(text) + count):
            out = self.step(self.parts[: self.done], tokens[-1:], place, [record["output"]])
            hidden = {"hidden": out[record["output"]]}
            out = self.functions.call(record["function"], hidden, ["draft_tokens"])
            tokens.append(int(out["draft_tokens"].flat[0]))
        return chain(tokens[1:-1])

    def depth(self, place):
        """The functions of a step: all, or the first and as many of the last as the budget."""
        record, sizes = self.plan["depth"], self.layers[:-1]
        if record["kind"] == "full":
            return self.parts[self.done :]
        if record["kind"] == "decay":
            budget = max(int(sum(sizes) * record["alpha"] ** place), record["least"])
        else:
            most = record["most"] or sum(sizes)
            budget = int(most - (most - record["least"]) * min(place / record["tokens"], 1.0))
        last = sum(np.cumsum(sizes[:0:-1]) <= budget - sizes[0])
        return [self.parts[0], *self.parts[len(self.parts) - 1 - last :]]

    def best(self, never):
        """The most likely token after each column of the last step, except suppressed ones."""
        if not never:
            return self.out["argmax"][0].tolist()
        self.out["logits"][..., never] = -np.inf
        return self.out["logits"][0].argmax(-1).tolist()

    def begun(self, prompt, new, begin):
        """The initial text and its maximum length; allocates states. With an encoder, the prompt
        is the source."""
        source, context, rows = self.plan["source"], self.model["context"], 1
        text, encoder, self.readable = list(prompt), source.get("function"), []
        if encoder:
            rows = len(prompt) if source["vocabulary"] else source["most"]
            if not 0 < rows <= source["most"]:
                raise SystemExit(f"expected a source of 1 to {source['most']} tokens, got {rows}")
            if 0 < source["vocabulary"] <= self.model["vocab_size"]:
                self.readable = text
            text = list(source["start"] if begin is None else begin)
        if not 0 < len(text) < context:
            raise SystemExit(f"expected a prompt of 1 to {context - 1} tokens, got {len(text)}")
        limit = min(len(text) + new, context)
        self.functions.reserve(limit + self.overhang, rows)
        if encoder:
            self.functions.encode(encoder, prompt, source["most"])
        return text, limit

    def verify(self, nodes, parents, last, past, first, never):
        """One step on the last token and its drafts: the accepted ones and the token after them."""
        tree = np.eye(1 + len(nodes), dtype=np.bool_)
        for node, parent in enumerate(parents, 1):
            tree[node] |= tree[parent + 1]
        tree = None if (nodes, parents) == chain(nodes) else tree
        self.out = self.step(self.depth(past - first), [last, *nodes], past, self.fetch, None, tree)
        best, path = self.best(never), [0]
        for node, parent in enumerate(parents, 1):
            if parent + 1 == path[-1] and nodes[node - 1] == best[parent + 1]:
                path.append(node)
        if tree is not None:
            self.functions.commit(past, path)
        self.column, self.steps = path[-1], self.steps + 1
        return [best[node] for node in path]

    def generate(self, prompt, new, eos=None, begin=None):
        """The tokens after a prompt: `new`, or up to one of `eos` or the context's end. begin:
        initial tokens of a text with a source; default: the plan's."""
        return [token for tokens in self.stream(prompt, new, eos, begin) for token in tokens]

    def stream(self, prompt, new, eos=None, begin=None):
        """As `generate`; yields the tokens of each step."""
        eos, rules, self.steps = self.model["eos"] if eos is None else eos, self.rules, 0
        text, limit = self.begun(prompt, new, begin)
        told = first = len(text)
        never = rules.get("suppress_tokens", [])
        logits = ["logits"] if never or "begin_suppress_tokens" in rules else []
        self.fetch = ["argmax", "drafted", "hidden", *logits]
        if first == 1 and "forced_bos_token_id" in rules:
            text.append(rules["forced_bos_token_id"])
        for past in range(0, len(text), self.calls["chunk"]):
            part = text[past : past + self.calls["chunk"]]
            self.column, kind = len(part) - 1, self.calls["prompt"]
            self.out = self.step(kind, part, past, self.fetch, [self.column], certain=len(part))
        not_first = rules.get("begin_suppress_tokens", []) if len(text) == first else []
        tokens = self.best([*never, *not_first])
        while True:
            text += tokens
            ends = [i for i in range(first, len(text)) if text[i] in eos or i + 1 == limit]
            if ends:
                if ends[0] + 1 == limit:
                    text[ends[0]] = rules.get("forced_eos_token_id", text[ends[0]])
                yield text[told : ends[0] + 1]
                return
            yield text[told:]
            told = len(text)
            self.done, past = 0, len(text) - 1
            drafted = self.draft(text, limit - len(text) - 1)
            tokens = self.verify(*drafted, text[-1], past, first, never)


if __name__ == "__main__":
    folder, given, count = sys.argv[1:]
    sound = pathlib.Path(given).is_file()
    try:
        prompt = np.fromfile(given, np.float32) if sound else list(map(int, given.split(",")))
        count = int(count)
    except ValueError as error:
        raise SystemExit(f"expected token ids, as 1,2,3, and a number of tokens: {error}") from None
    with refusing(folder):
        print(*Runner(folder).generate(prompt, count), sep=",")
