"""Drafts of models whose tokens are not the target's."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import whole
from test_runtime_cached import CHAIN, LATE, WIDE, decode, drafting, plainly
from test_runtime_sampling import assert_distributed
from tiny import named, tiny_llama
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import graftwork as gw
from graftwork.backends import compile
from graftwork.backends.target import Target
from graftwork.ir import InputError, PassError, Program, UnsupportedError, Weight, WeightStore
from graftwork.ir.support.spelling import Spelling, shared_tokens
from graftwork.passes.drafting.draft_model import DraftModel
from graftwork.passes.engine.manager import run_passes
from graftwork.recipe import Recipe
from graftwork.runtime.speculate.draft_cache import DraftCache
from graftwork.runtime.speculate.proposers.translated import _Chain
from graftwork.runtime.speculate.translated import Translated, Vocabularies

LETTERS = "abcdefghijklmnop qrstuvwxyz.,!\n?"
"""32 tokens of a byte each."""

COPYING = "suffix(tokens=4, longest=16, shortest=1)"
PROMPTS = [[3, 4, 5, 6, 7, 8, 3, 4], [5, 6], [9], [1, 2, 3, 16, 4, 5, 6, 7]]


def byte_level(path: Path, tokens: Sequence[str], merges: Sequence[str] = (), **more: Any) -> Path:
    """A byte-level tokenizer.json with plain tokens in this order; the merges' tokens follow."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [level.pre_tokenize_str(token)[0][0] for token in [*tokens, *merges]]
    pairs = [(word[:-1], word[-1]) for word in spelled[len(tokens) :]]
    made = Tokenizer(models.BPE({word: id for id, word in enumerate(spelled)}, pairs))
    made.pre_tokenizer, made.decoder = level, decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in more.get("special", ())])
    made.save(str(path))
    return path


def of_pieces(path: Path, tokens: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> Path:
    """A tokenizer.json as SentencePiece's, with bytes for what is no token, and with spaces put
    before texts."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), *tokens, *map("".join, merges)]
    ids = {word: id for id, word in enumerate(words)}
    made = Tokenizer(models.BPE(ids, list(merges), byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    undone: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*undone, decoders.Strip(" ", 1, 0)])
    made.save(str(path))
    return path


def permuted(program: Program, order: Sequence[int]) -> Program:
    """The model with its token `order[i]` as token i."""
    made = {
        name: Weight.of(name, weight.load()[list(order)].clone())
        if name in ("embed", "head")
        else weight
        for name, weight in program.weights.items()
    }
    return program.replace(weights=WeightStore(made))


def beside(tmp_path: Path, order: Sequence[int], merges: Sequence[str] = ()) -> Program:
    """A tiny model of `LETTERS`, and itself with its tokens in another order; of the tokens that
    merges add the draft knows nothing."""
    wide = tiny_llama(vocab=32)
    ours = byte_level(tmp_path / "ours.json", LETTERS)
    theirs = byte_level(tmp_path / "theirs.json", [LETTERS[id] for id in order], merges)
    guest = permuted(wide, [*order, *order[: len(merges)]])
    if len(order) + len(merges) != 32:
        shape = tiny_llama(vocab=len(order) + len(merges))
        guest = shape.replace(weights=guest.weights)
    guest = guest.replace(assets={"tokenizer.json": theirs})
    return wide.replace(assets={"tokenizer.json": ours}, guests={"other": guest})


ORDER = [(7 * place + 3) % 32 for place in range(32)]
FEWER = [id for id in ORDER if id < 24]


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.parametrize("vocabulary", ["auto", "text"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_same_model_of_other_tokens_is_accepted_whole(
    backend: str, vocabulary: Any, batch: int, tmp_path: Path
) -> None:
    """Every mistake in a table, a translation or a row costs tokens."""
    draft = DraftModel(model="other", vocabulary=vocabulary)
    executable = compile(drafting(draft, CHAIN, beside(tmp_path, ORDER)), Target.parse(backend))
    result = decode(executable, PROMPTS[:batch], 1 + 6 * 4)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS[:batch], 25))
    assert (result.stats.steps, result.stats.accepted_tokens) == (6, 6 * 3 * batch)


@pytest.mark.parametrize("tree", [WIDE, LATE], ids=["wide", "late"])
def test_trees_of_shared_tokens_are_accepted_whole(tree: Any, tmp_path: Path) -> None:
    program = drafting(DraftModel(model="other"), tree, beside(tmp_path, ORDER))
    executable = compile(program, Target.parse("eager"))
    result = decode(executable, PROMPTS, 1 + 6 * 4)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS, 25))
    assert (result.stats.steps, result.stats.accepted_tokens) == (6, 6 * 3 * 4)


MERGES = ["ab", "bc", "ca", "de", "cc", "dd", "ee", "aa", " b", "abc", "dde"]


def fewer(tmp_path: Path) -> Program:
    """A tiny model that says what the draft beside it cannot, which has longer tokens."""
    guest = tiny_llama(vocab=6 + len(MERGES), seed=1).replace(
        assets={"tokenizer.json": byte_level(tmp_path / "theirs.json", " edcba", MERGES)}
    )
    ours = byte_level(tmp_path / "ours.json", "abcde !")
    return tiny_llama(vocab=7).replace(assets={"tokenizer.json": ours}, guests={"other": guest})


class Rows:
    """Which tokens a draft's cache has rows of, by sequence; checks that those before what is fed
    are the text's. fed: tokens so far. changed: times that a text's own tokens became others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[int, dict[int, int]] = defaultdict(dict)
        self.texts: list[Translated] = []
        self.fed = self.changed = 0
        run, begin, extend = DraftCache.run, Translated.__init__, Translated.extend

        def running(
            cache: DraftCache, tokens: Any, positions: Any, past: Any, *rest: Any, **more: Any
        ) -> Any:
            for index, text in enumerate(self.texts):
                start, held = past[index], self.held[index]
                known = min(start, len(text.ids))
                assert [held[row] for row in range(known)] == text.ids[:known]
                held.update(enumerate(tokens[index].tolist(), start))
            self.fed += tokens.shape[1]
            return run(cache, tokens, positions, past, *rest, **more)

        def beginning(text: Translated, *given: Any) -> None:
            begin(text, *given)
            self.texts.append(text)

        def extending(text: Translated, tokens: Sequence[int]) -> int:
            before = len(getattr(text, "ids", ()))
            same = extend(text, tokens)
            self.changed += same < before
            return same

        monkeypatch.setattr(DraftCache, "run", running)
        monkeypatch.setattr(Translated, "__init__", beginning)
        monkeypatch.setattr(Translated, "extend", extending)


@pytest.mark.parametrize(
    ("vocabulary", "drafter"), [("shared", ""), ("shared", COPYING), ("text", "")]
)
def test_tokens_that_one_of_both_lacks(
    vocabulary: Any, drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are encoded anew, and rows of what has become another token are made again."""
    draft = DraftModel(model="other", vocabulary=vocabulary, levels=3, drafter=drafter)
    executable = compile(drafting(draft, CHAIN, fewer(tmp_path)), Target.parse("eager"))
    prompts = [[0, 1, 2, 0, 1, 3, 2, 3], [3, 4], [6, 6, 0], [5, 0, 5, 1]]
    result = decode(executable, prompts, 60)
    assert torch.equal(result.sequences, plainly(executable, prompts, 60))
    rows = Rows(monkeypatch)
    generator = torch.Generator().manual_seed(5)  # what is sampled does not repeat itself
    result = decode(executable, prompts, 60, do_sample=True, top_k=0, generator=generator)
    assert rows.changed > 20 and rows.fed > 100 and result.stats.accepted_tokens > 0


@pytest.mark.parametrize("verify", ["", "verify_rejection"])
@pytest.mark.parametrize("vocabulary", ["shared", "text"])
def test_samples_follow_the_targets_distribution(
    vocabulary: Any, verify: str, tmp_path: Path
) -> None:
    """The draft lacks a token, and has one more."""
    start = tiny_llama(vocab=5).replace(
        assets={"tokenizer.json": byte_level(tmp_path / "ours.json", "abcde")}
    )
    theirs = {"tokenizer.json": byte_level(tmp_path / "theirs.json", "dcba", ["ab"])}
    guest = tiny_llama(vocab=5, seed=1).replace(assets=theirs)
    draft = DraftModel(model="other", levels=3, candidates=4, vocabulary=vocabulary)
    more = [named(verify)] if verify else []
    made = drafting(draft, CHAIN, start.replace(guests={"other": guest}), *more)
    executable = compile(made, Target.parse("eager"))
    exact = {}
    for tokens in itertools.product(range(5), repeat=3):
        logits = whole(made, "step", [3, *tokens])["logits"][0]
        exact[tokens] = float(logits.softmax(-1)[[0, 1, 2], list(tokens)].prod())
    generator = torch.Generator().manual_seed(1)
    result = decode(executable, [[3]] * 600, 3, do_sample=True, top_k=0, generator=generator)
    assert_distributed(Counter(map(tuple, result.sequences[:, 1:].tolist())), exact)
    assert result.stats.accepted_tokens > 0


def test_a_models_distribution_is_that_of_the_tokens_of_both(tmp_path: Path) -> None:
    """TLI by hand: q(t) = p(t) / sum of p over the shared tokens, by the target's ids."""
    start = beside(tmp_path, FEWER, ["ab", "cd"])
    made = drafting(DraftModel(model="other", candidates=3), CHAIN, start)
    text = [FEWER.index(LETTERS.index(letter)) for letter in "pad"]
    said = whole(made, "draft", text)
    q = said["draft_logits"][0, -1].softmax(-1)
    p = whole(start.guests["other"], "step", text)["logits"][0, -1].softmax(-1)
    wanted = torch.zeros(32)
    for place, id in enumerate(FEWER):
        wanted[id] = p[place] / p[:24].sum()
    assert torch.allclose(q, wanted, atol=1e-6)
    assert said["draft_tokens"][0, -1].tolist() == wanted.topk(3).indices.tolist()


def test_a_staged_model_of_other_tokens(tmp_path: Path) -> None:
    """The same drafts as without a drafter of its own, and of the same model all are accepted."""
    draft = DraftModel(model="other", levels=6, drafter=COPYING)
    program = drafting(draft, named("tree_chain", depth=6), beside(tmp_path, ORDER))
    executable = compile(program, Target.parse("eager"))
    result = decode(executable, PROMPTS, 1 + 8 * 7)
    assert torch.equal(result.sequences, plainly(executable, PROMPTS, 1 + 8 * 7))
    assert (result.stats.steps, result.stats.accepted_tokens) == (8, 8 * 6 * 4)


def test_what_tokens_write_is_compared(tmp_path: Path) -> None:
    """Spaces and bytes as either kind spells them; special tokens by their names alone."""
    ours = Spelling(byte_level(tmp_path / "a.json", ["a", " ", "Ã", "b"], [" a"], special=["<e>"]))
    theirs = Spelling(of_pieces(tmp_path / "b.json", ["b", "a", "▁", "<e>"], [("▁", "a")]))
    found = shared_tokens(ours, theirs, (ours.tokenizer.get_vocab_size(), 300))
    names = [theirs.tokenizer.id_to_token(id) for id in found[1]]
    assert [ours.bytes_of(id) for id in found[0]] == [b"a", b" ", b"b", b" a"]
    assert names == ["a", "▁", "b", "▁a"]  # and not the bytes <0x61>, ...
    assert (theirs.prefix, ours.prefix) == (" ", "")
    assert b"".join(map(theirs.bytes_of, theirs.encode("a bé")[0])).decode() == "a bé"


def words_of(ours: Path, theirs: Path) -> Vocabularies:
    """Two vocabularies."""
    pair = Spelling(ours), Spelling(theirs)
    sizes = [one.tokenizer.get_vocab_size() for one in pair]
    known = torch.full((sizes[0],), -1)
    first, second = shared_tokens(*pair, (sizes[0], sizes[1]))
    known[first] = torch.tensor(second)
    return Vocabularies(*pair, known.numpy())


def test_a_growing_text_is_what_the_whole_of_it_would_be(tmp_path: Path) -> None:
    """Whatever it grows by, through merges of tokens that were apart; what stays is told."""
    merges = ["ab", "cd", "abc", " q", "hi"]
    words = words_of(
        byte_level(tmp_path / "a.json", LETTERS), byte_level(tmp_path / "b.json", LETTERS, merges)
    )
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(0, 17, (400,), generator=generator).tolist()
    text[50:53] = text[200:203] = [0, 1, 2]
    growing, place = Translated(words, text[:5]), 5
    while place < len(text):
        count = int(torch.randint(1, 6, (1,), generator=generator))
        before = list(growing.ids)
        same = growing.extend(text[place : place + count])
        place += count
        assert growing.ids == Translated(words, text[:place]).ids
        assert growing.ids[:same] == before[:same]
        assert same == len(before) or growing.ids[same : same + 1] != before[same : same + 1]
    said = b"".join(map(words.theirs.bytes_of, growing.ids)).decode()
    assert said == "".join(LETTERS[token] for token in text)
    assert len(growing.ids) < len(text)


def test_a_text_that_ends_within_a_character(tmp_path: Path) -> None:
    """Its bytes are taken as they are where both have them; else nothing follows until it is whole.
    Special tokens that the model lacks are left out."""
    letters = ["a", " ", "é"]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    first, second = level.pre_tokenize_str("é")[0][0]
    made = Tokenizer(models.BPE({"a": 0, "Ġ": 1, first: 2, second: 3, "b": 4}, []))
    made.pre_tokenizer, made.decoder = level, decoders.ByteLevel()
    made.add_special_tokens(["<x>"])
    made.save(str(tmp_path / "a.json"))
    with_bytes = words_of(tmp_path / "a.json", of_pieces(tmp_path / "b.json", ["▁", *letters]))
    text = Translated(with_bytes, [0, 5, 0, 2])
    names = [with_bytes.theirs.tokenizer.id_to_token(id) for id in text.ids]
    assert (names, text.ready) == (["▁", "a", "a", "<0xC3>"], True)
    assert text.extend([3, 4]) == 3
    names = [with_bytes.theirs.tokenizer.id_to_token(id) for id in text.ids]
    assert names == ["▁", "a", "a", "é", "<0x62>"]
    without = words_of(tmp_path / "a.json", byte_level(tmp_path / "c.json", "a b"))
    text = Translated(without, [0, 2])
    assert not text.ready
    text.extend([3, 0])
    assert (text.ready, text.rest) == (True, b"")


def test_what_a_model_writes_in_the_targets_tokens(tmp_path: Path) -> None:
    """By hand: with the words before it where a token ends as the text does, else alone. What ends
    a draft may become part of a longer token; the tokens before do not change."""
    words = words_of(
        byte_level(tmp_path / "a.json", "abcd", ["ab", "cd"]),
        byte_level(tmp_path / "b.json", "dcba"),
    )
    chain = _Chain(Translated(words, [2, 3]))  # "cd"
    chain.add(3)
    assert (chain.tokens, chain.take(False)) == ([0], -1)  # "a"
    chain.add(2)
    assert chain.tokens == [4] and chain.take(False) == -1  # "ab"
    chain.add(1)
    assert (chain.take(False), chain.take(False), chain.take(True)) == (4, -1, 2)  # "abc"
    across = _Chain(Translated(words, [3, 0]))  # "da"
    for token in (2, 1):  # "bc": the target's "ab" would reach across
        across.add(token)
    assert across.tokens == [1, 2]


def test_models_without_what_is_needed(tmp_path: Path) -> None:
    start = beside(tmp_path, ORDER)
    with pytest.raises(PassError, match=r"tokenizers of tiny and tiny differ.*vocabulary=same"):
        DraftModel(model="other", vocabulary="same").run(start)
    bare = start.replace(assets={})
    with pytest.raises(PassError, match=r"vocabulary=shared translates .* tiny came without a tok"):
        DraftModel(model="other", vocabulary="shared").run(bare)
    with pytest.raises(PassError, match="vocabulary=text and drafter='suffix"):
        DraftModel(model="other", vocabulary="text", drafter="suffix(tokens=4)").run(start)
    other = start.guests["other"]
    strange = {"tokenizer.json": byte_level(tmp_path / "none.json", "XYZ")}
    none = start.replace(guests={"other": other.replace(assets=strange)})
    with pytest.raises(PassError, match="no token in common"):
        DraftModel(model="other").run(none)


def test_an_artifact_has_the_drafts_tokenizer(tmp_path: Path) -> None:
    """It travels with the program, and the loaded one drafts as the saved one did."""
    made = drafting(DraftModel(model="other"), CHAIN, beside(tmp_path, ORDER))
    model = gw.Model(made, Target.parse("eager"), {"name": "t"})
    model.save(tmp_path / "out")
    assert (tmp_path / "out" / "draft.tokenizer.json").exists()
    read = gw.load(tmp_path / "out")
    result = decode(read.executable, PROMPTS, 25)
    assert result.stats.accepted_tokens == 6 * 3 * 4
    (tmp_path / "out" / "draft.tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"draft.tokenizer.json is damaged"):
        gw.load(tmp_path / "out")


@pytest.mark.parametrize("drafter", ["", COPYING])
def test_a_conversation_goes_on(
    drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the draft's own tokens are kept from call to call, as far as these are the same."""
    draft = DraftModel(model="other", levels=3, drafter=drafter)
    program = drafting(draft, CHAIN, fewer(tmp_path))
    model = gw.Model(program, Target.parse("eager"), {"name": "t"})
    options = {"eos_token_id": [], "pad_token_id": 0, "return_dict_in_generate": True}
    rows = Rows(monkeypatch)
    # The second text ends the first one's last words otherwise: "ab" becomes "abc".
    first = torch.tensor([[3, 0, 1, 5, 0, 4] * 8 + [5, 0, 1]])
    model.generate(first, max_new_tokens=9, **options)
    rows.texts, rows.fed = [], 0
    longer = torch.cat([first, torch.tensor([[2, 3]])], 1)
    again = model.generate(longer, max_new_tokens=17, **options)
    kept, rows.texts, rows.fed = rows.fed, [], 0
    assert again.stats.reused_tokens > 40
    model.forget()
    anew = model.generate(longer, max_new_tokens=17, **options)
    assert torch.equal(anew.sequences, again.sequences)
    assert anew.stats.accepted_tokens == again.stats.accepted_tokens
    assert rows.fed > kept + 20
    rows.texts = []
    model.save_prefix(first, tmp_path / "prefix")
    model.forget()
    model.load_prefix(tmp_path / "prefix")
    rows.texts = []
    found = model.generate(longer, max_new_tokens=17, **options)
    assert found.stats.reused_tokens > 40 and torch.equal(found.sequences, anew.sequences)


@pytest.mark.parametrize("name", ["token_intersection", "universal_assisted"])
def test_the_recipes(name: str, tmp_path: Path) -> None:
    """Whole, with what else they run; and a loop, which has no tokenizer, refuses them."""
    steps = Recipe.load(name).with_options(["draft_model.model=other"]).steps
    program = run_passes(beside(tmp_path, ORDER), steps)[0]
    model = gw.Model(program, Target.parse("eager"), {"name": name})
    result = decode(model.executable, PROMPTS[:1], 40)
    assert torch.equal(result.sequences, plainly(model.executable, PROMPTS[:1], 40))
    assert result.stats.accepted_tokens > 0
    with pytest.raises(UnsupportedError, match=f"draft={program.plan.draft.kind}.* no form there"):
        model.export_onnx_loop(tmp_path / "loop")
