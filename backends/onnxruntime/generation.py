"""A whole generation as one ONNX graph: the step in a Loop, prompts in, tokens out.

Every pass through the loop feeds what is not in the caches yet: first the prompt, then the last
token and its draft. So the step, with its weights, stands in the graph once. A Loop copies what it
carries, and GroupQueryAttention would copy a cache once for each head that reads it. So caches of
whole steps begin empty, and what is fed is concatenated for ONNX's own Attention (see `portable`);
rows that are taken back are cut off. Others have room for everything from the start.

Two forms:

- together: nothing is drafted, and steps are whole. A batch's sequences run side by side.
- in turn: a chain is drafted, and how much of it is kept differs from sequence to sequence; or a
  step goes as deep as its token needs (see `depths_in_graph`); or products round activations, and a
  token's attention must not depend on what shares its step; or there are recurrences, which take a
  prompt piece by piece (see `lower.piece_of`). An outer Loop takes one sequence after the other.

A token is the step's argmax or, sampling, drawn by the number that `uniforms` has for its place. A
draft is kept as far as it says what was chosen, so it changes no token, sampled or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as oir
import torch

from ...ir import Program, UnsupportedError
from ...ir.plan import DecodePlan, Whole
from .attention import SEQLENS, TOTAL
from .carried import Carried
from .chains_in_graph import CHAINS, Stepped
from .depths_in_graph import DEPTHS, called, run_step
from .emit import IR_VERSION, OPSETS, Emitted
from .graph_builder import BOOL, I64, GraphBuilder
from .loop_limits import check_loop
from .lower import piece_of
from .portable import MASK, is_concatenable
from .rules_in_graph import Rules
from .sampler import Draw, Sampling, sampled, seen_after
from .sources_in_graph import SourceInputs
from .steps_in_graph import Fed, Functions, Steps, Values

G = torch.ops.graftwork
I32 = oir.DataType.INT32


def generation(
    program: Program, *, sample: bool = False, plain: bool = False, contrib: bool = True
) -> Emitted:
    """The graph. sample: with the inputs that sampling needs (see `Sampling`). plain: leave out
    what the program drafts with. contrib: with ONNX Runtime's own ops, too; without them caches
    begin empty and grow, and are cut where rows are taken back.

    Inputs: input_ids i64[B,S], padded on the right; lengths i64[B]; max_new i64[]; eos i64[E].
    Where texts are written from a source, input_ids and lengths, or input_features, are that, and
    decoder_input_ids i64[B,D] is what they begin with.
    Outputs: tokens i64[B,N], after an end of text the pad id; counts i64[B], the end included.
    Errors: `UnsupportedError` for a program that is more than a step and a chain, naming the format
    that carries it.
    """
    if plain:
        plan = DecodePlan(step=Whole(program.plan.step.plain), cache=program.plan.cache)
        program = program.replace(plan=replace(plan, depth=program.plan.depth))
    check_loop(program, sample, contrib)
    if not contrib and not isinstance(program.plan.step, Whole):
        raise UnsupportedError(
            f"{program.name} has more than a plain step (step={program.plan.step.brief}), which "
            f"loops of ONNX's own ops have no form for: export it with those of ONNX Runtime, too "
            f"(ops=contrib), or plain (plain=True, --plain)"
        )
    return _Generation(program, sample, contrib).build()


class _Generation:
    def __init__(self, program: Program, sample: bool, contrib: bool) -> None:
        self.program, self.contrib = program, contrib
        names = called(program)
        self.piece = piece_of(program.function(names[0])) if program.recurrent else None
        routed = Functions(program, contrib, not contrib)
        rounds = routed.rounds(names)
        self.alone = program.plan.speculates or rounds or program.recurrent or len(names) > 1
        self.twice = routed.twice(names)
        whole = isinstance(program.plan.step, Whole) and not program.recurrent
        # What rounds has two queries for a lone token, which that kernel takes longer for.
        joins = whole and not rounds and is_concatenable(program, names[-1])
        self.concatenates = joins or not contrib
        self.functions = Functions(program, contrib, self.concatenates)
        head = self.functions.of(names[-1])
        self.picks = head.has_input("select")
        self.rules = Rules(program.info.defaults, program.info.vocab_size)
        scored = sample or self.rules.forbid or "argmax" not in head.outputs
        best = "logits" if scored else "argmax"
        depth = program.plan.depth
        scores = [name for _, made in depth.calls(program.plan) for name in made]
        wanted = {best, "hidden", "drafted", *scores}  # of what drafts read, all but exits' states
        self.steps = Steps(self.functions, frozenset(wanted))
        fns = [self.functions.of(name) for name in names]
        states = [n for n in program.states if any(n in fn.outputs for fn in fns)]
        # Caches may begin empty where they are concatenated, or where GroupQueryAttention makes
        # them as long as it must, as long as no row is taken back.
        kernel = not self.alone and not head.calls(G.cache_write.default)
        grows = kernel or self.concatenates
        self.carried = Carried(program, states, DEPTHS[type(depth)].carries, grows)
        self.spare = program.plan.step.fed(argmax=True)[1]
        opsets = OPSETS if contrib else {"": OPSETS[""]}
        self.g = GraphBuilder("generate", opsets)
        g = self.g
        self.source = None
        if program.plan.source.encoder is None:
            self.ids = g.input("input_ids", I64, ["batch_size", "prompt_length"])
            self.lengths = g.checked_lengths(self.ids, g.input("lengths", I64, ["batch_size"]))
        else:
            self.source = SourceInputs(g, program, self.functions)
            self.ids = g.input("decoder_input_ids", I64, ["batch_size", "begin_length"])
            self.lengths = g.op("Expand", g.size(self.ids, 1), g.vector(g.size(self.ids, 0)))
        self.most = g.input("max_new", I64, [])
        self.eos = g.input("eos", I64, ["ends"])
        self.sampling = Sampling.inputs(g) if sample else None

    def build(self) -> Emitted:
        """See `generation`."""
        g = self.g
        tokens, counts = self.in_turn() if self.alone else self.together()
        width = g.op("ReduceMax", counts, keepdims=0)
        g.output("tokens", g.slice(tokens, None, width, 1), I64, ["batch_size", "generated"])
        g.output("counts", counts, I64, ["batch_size"])
        model = oir.Model(g.graph, ir_version=IR_VERSION)
        return Emitted(model, tuple(g.weights.values()))

    @property
    def pad(self) -> int:
        """What stands behind an end of text."""
        info = self.program.info
        return info.pad if info.pad is not None else next(iter(info.eos), 0)

    # -- the step

    def given(
        self, g: GraphBuilder, tokens: oir.Value, past: oir.Value, select: oir.Value
    ) -> dict[str, oir.Value]:
        """Inputs of functions that are fed tokens i64[B,T] behind `past` i64[B] rows; `select`
        [B,S] are the columns to choose at."""
        with g.within("feed"):
            width = g.size(tokens, 1)
            steps = g.range(g.const(0), width)
            places = g.op("Add", g.op("Unsqueeze", past, g.const([1])), steps)
            last = g.const(self.program.info.context - 1)
            end = g.op("Sub", g.op("Add", past, width), g.const(1))
            longest = g.op("ReduceMax", end, keepdims=0)
            return {
                "tokens": tokens,
                # Sequences that are through, and columns that nobody wants, may stand behind it.
                "positions": g.op("Min", places, last),
                "past": past,
                "select": select,
                SEQLENS: g.cast(end, I32),
                TOTAL: g.cast(g.op("Add", longest, g.const(1)), I32),
            }

    def choose(
        self,
        g: GraphBuilder,
        outputs: Mapping[str, oir.Value],
        select: oir.Value,
        draw: Draw | None,
        begins: oir.Value,
    ) -> oir.Value:
        """Tokens i64[B,S]. begins: bool[], whether they are the first new ones."""
        if self.rules.forbid:
            allowed = self.rules.allowed(g, outputs["logits"], begins)
            outputs = {"logits": allowed}
        if self.sampling is None or draw is None:
            best = (
                outputs["argmax"]
                if "argmax" in outputs
                else g.op("ArgMax", outputs["logits"], axis=-1, keepdims=0)
            )
            found: oir.Value = best if self.picks else g.op("GatherElements", best, select, axis=1)
            return found
        logits = outputs["logits"]
        if not self.picks:
            index = g.op("Unsqueeze", select, g.const([2]))
            logits = g.op("GatherND", logits, index, batch_dims=1)
        rows = g.op("Reshape", logits, g.const([-1, self.program.info.vocab_size]))
        flat = sampled(g, rows, draw, self.sampling)
        chosen: oir.Value = g.op("Reshape", flat, g.op("Shape", select))
        return chosen

    def ends(self, g: GraphBuilder, tokens: oir.Value) -> Any:
        """bool, of tokens i64[R]: whether they end a text."""
        with g.within("ends"):
            each = g.op("Equal", g.op("Unsqueeze", tokens, g.const([1])), self.eos)
            return g.op("Greater", g.total(each, 1), g.const(0))

    def uniforms(self, g: GraphBuilder) -> Any:
        """The draws f32[B,max_new], None where nothing is sampled; any other shape is an error that
        says so."""
        if self.sampling is None:
            return None
        shape = g.vector(g.size(self.ids, 0), self.most)
        return g.op("Reshape", self.sampling.uniforms, shape, called="uniforms_are_batch_x_max_new")

    # -- the two forms

    def together(self) -> tuple[Any, Any]:
        """(tokens i64[B,N], counts i64[B]) of a batch side by side."""
        g, context = self.g, self.program.info.context
        batch = g.size(self.ids, 0)
        rows = g.op("Add", g.op("Add", g.size(self.ids, 1), self.most), g.const(1))
        zeros = g.op("Expand", g.const(0), g.vector(batch))
        column = g.op("Unsqueeze", g.op("Sub", self.lengths, g.const(1)), g.const([1]))
        start = [self.ids, zeros, column, g.op("Not", g.op("Equal", zeros, zeros)), zeros]
        draws = self.uniforms(g)
        read = {} if self.source is None else self.source.together(g)

        body = g.body("generate.pass")
        turn = body.graph.inputs[0]
        tokens = body.input("tokens", I64, ["batch_size", "fed"])
        past = body.input("past", I64, ["batch_size"])
        chosen = body.input("column", I64, ["batch_size", 1])
        through = body.input("through", BOOL, ["batch_size"])
        counts = body.input("counts", I64, ["batch_size"])
        draw = None
        if draws is not None:
            seen = body.input("seen", BOOL, ["batch_size", self.program.info.vocab_size])
            draw = Draw(body.op("Gather", draws, body.vector(turn), axis=1), seen)
            start.append(self.seen_in_prompts(g))
        values = {**read, **self.carried.inputs(body)}
        given = self.given(body, tokens, past, chosen)
        if self.concatenates:
            given[MASK] = self.mask_with(body, tokens, chosen)
        values |= self.steps.call(called(self.program)[-1], given)(body, values)
        begins = body.op("Equal", turn, body.const(0))
        with body.within("choose"):
            new = self.choose(body, values, chosen, draw, begins)
        new, fed = (body.op("Squeeze", value, body.const([1])) for value in (new, chosen))
        fed = body.op("Add", fed, body.const(1))
        grown = body.op("Where", through, past, body.op("Add", past, fed))
        full = body.op("GreaterOrEqual", grown, body.const(context - 1))
        new = self.rules.begun(body, new, begins, body.size(tokens, 1))
        last = body.op("Equal", body.op("Add", turn, body.const(1)), self.most)
        new = self.rules.ended(body, new, body.op("Or", full, last))
        token = body.op("Where", through, body.const(self.pad), new)
        done = body.op("Or", through, body.op("Or", self.ends(body, token), full))
        more = body.cast(body.op("Not", through), I64)
        left = body.total(body.op("Not", done), 0)
        body.output("still", body.op("Greater", left, body.const(0)), BOOL, [])
        after = body.op("Unsqueeze", token, body.const([1]))
        body.output("tokens_next", after, I64, None)
        body.output("past_next", grown, I64, None)
        body.output("column_next", body.op("Mul", chosen, body.const(0)), I64, None)
        body.output("through_next", done, BOOL, None)
        body.output("counts_next", body.op("Add", counts, more), I64, None)
        if draw is not None:
            body.output("seen_next", body.marked(draw.seen, after), BOOL, None)
        self.carried.outputs(body, values)
        start += self.carried.start(g, batch, rows)
        if self.concatenates:
            body.output("mask_next", given[MASK], I64, None)
            start.append(g.op("Expand", g.const([[0]]), g.vector(batch, g.const(0))))
        body.output("token", token, I64, None)
        results = g.loop(body, self.most, None, start)
        return g.op("Transpose", results[-1], perm=[1, 0]), results[4]

    def mask_with(self, body: GraphBuilder, tokens: oir.Value, last: oir.Value) -> oir.Value:
        """The mask i64[B,P] of rows, those of a step's tokens up to the last ones [B,1] included:
        padding behind a prompt stays in the caches, unseen."""
        mask = body.input(MASK, I64, ["batch_size", "rows"])
        real = body.op("LessOrEqual", body.range(body.const(0), body.size(tokens, 1)), last)
        whole: oir.Value = body.op("Concat", mask, body.cast(real, I64), axis=1)
        return whole

    def seen_in_prompts(self, g: GraphBuilder) -> Any:
        """bool[B,V]: the tokens of each prompt."""
        real = g.op(
            "Less",
            g.range(g.const(0), g.size(self.ids, 1)),
            g.op("Unsqueeze", self.lengths, g.const([1])),
        )
        first = g.slice(self.ids, None, g.const(1), 1)
        vocabulary = g.const(self.program.info.vocab_size)
        none = g.flags(g.vector(g.size(self.ids, 0), vocabulary))
        return g.marked(none, g.op("Where", real, self.ids, first))

    def in_turn(self) -> tuple[Any, Any]:
        """(tokens i64[B,max_new], counts i64[B]), a sequence after the other."""
        g = self.g
        draws = self.uniforms(g)
        each = g.body("generate.sequence")
        index = each.graph.inputs[0]
        length = each.op("Gather", self.lengths, index)
        padded = each.op("Gather", self.ids, index, axis=0)
        prompt = each.slice(padded, None, length)
        own = None if draws is None else each.op("Gather", draws, index, axis=0)
        limit = each.op(
            "Min", each.op("Add", length, self.most), each.const(self.program.info.context)
        )
        source, read = None, Values()
        if self.source is not None:
            source = self.source.of(each, index)
            read = self.source.alone(each, index, source)
            source = source if self.source.readable else None
        body = self.chain_body(each, _Text(length, limit, own, read, source))
        step, draft = self.program.plan.columns + 2, each.none_of(prompt)
        rows = each.op("Add", limit, each.const(step + self.spare))
        values = self.carried.start(each, each.const(1), rows)
        going = each.op("Less", length, limit)
        passes = self.most
        if self.piece is not None:
            before = each.op("Div", each.op("Sub", length, each.const(1)), each.const(self.piece))
            passes = each.op("Add", passes, before)
        text, *_ = each.loop(body, passes, going, [prompt, draft, each.const(0), *values])
        new = each.slice(text, length, None)
        count = each.size(new, 0)
        rest = each.op("Sub", self.most, count)
        fill = each.op("Expand", each.const(self.pad), each.vector(rest))
        each.output("going_on", each.graph.inputs[1], BOOL, [])
        each.output("tokens", each.op("Concat", new, fill, axis=0), I64, None)
        each.output("count", count, I64, [])
        tokens, counts = g.loop(each, g.size(self.ids, 0), None, [])
        return tokens, counts

    def chain_body(self, each: GraphBuilder, of: _Text) -> GraphBuilder:
        """A pass of one sequence: feed what is new and the draft, keep what agrees, draft."""
        g = each.body("generate.pass")
        one = g.const(1)
        text = g.input("text", I64, ["text"])
        draft = g.input("draft", I64, ["drafted"])
        past = g.input("past", I64, [])
        values = {**of.read, **self.carried.inputs(g)}
        new, count = g.slice(text, past, None), g.size(draft, 0)
        if self.piece is not None:
            new = g.slice(new, None, g.const(self.piece))
        reached = g.op("Add", past, g.size(new, 0))
        whole = g.op("Equal", reached, g.size(text, 0))

        def after_all(yes: oir.Value, no: oir.Value) -> Any:
            """`no` behind a part of the prompt, where what comes next is known."""
            return yes if self.piece is None else g.op("Where", whole, yes, no)

        # Behind all that counts, so that no step has a lone token.
        again = [g.slice(text, g.const(-1), None)] if self.twice else []
        fed = g.op("Concat", new, draft, *again, axis=0)
        first = g.op("Sub", g.size(new, 0), one)
        columns = g.range(first, g.op("Add", g.op("Add", first, count), one))
        tokens, select = (g.op("Unsqueeze", value, g.const([0])) for value in (fed, columns))
        given = self.given(g, tokens, g.vector(past), select)
        if self.concatenates:
            rows = g.op("Add", past, g.size(tokens, 1))
            given[MASK] = g.op("Expand", g.const([[1]]), g.vector(g.const(1), rows))
            values |= self.carried.cut(g, values, past)
        if self.program.recurrent:
            given["certain"] = g.vector(g.size(new, 0))  # all but the draft
        step = of.fed(g, given, past, count)
        values = run_step(g, self.steps, step, values)
        chosen = self.chosen(g, of, text, draft, values, select, step.first)
        with g.within("verify"):
            accepted = g.leading(g.op("Equal", draft, g.slice(chosen, None, count)))
            gained = g.slice(chosen, None, after_all(g.op("Add", accepted, one), g.const(0)))
        grown, ended = self.grown(g, of, text, gained)
        size = g.size(grown, 0)
        room = g.op("Max", g.op("Sub", g.op("Sub", of.limit, size), one), g.const(0))
        room = after_all(room, g.const(0))
        column = g.op("Add", first, accepted)
        stepped = Stepped(grown, of.source, column, room, values, self.functions, self.given)
        record = self.program.plan.draft
        with g.within("draft"):
            chain, values = CHAINS[type(record)].draft(g, record, stepped)
        goes = g.op("And", g.op("Not", ended), g.op("Less", size, of.limit))
        g.output("goes", goes, BOOL, [])
        g.output("text_next", grown, I64, None)
        g.output("draft_next", g.slice(chain, None, room), I64, None)
        g.output("past_next", after_all(g.op("Sub", size, one), reached), I64, [])
        self.carried.outputs(g, values)
        return g

    def chosen(
        self,
        g: GraphBuilder,
        of: _Text,
        text: oir.Value,
        draft: oir.Value,
        values: Values,
        select: oir.Value,
        first: oir.Value,
    ) -> Any:
        """The tokens i64[D+1] behind the text and behind each token of the draft. first: whether
        they are the first new ones."""
        with g.within("draw"):
            draw = of.draw(g, text, draft, self.program.info.vocab_size)
        with g.within("choose"):
            found = self.choose(g, values, select, draw, first)
            return self.rules.begun(g, g.op("Squeeze", found, g.const([0])), first, of.length)

    def grown(
        self, g: GraphBuilder, of: _Text, text: oir.Value, gained: oir.Value
    ) -> tuple[Any, Any]:
        """The text with what it has gained up to its end, and whether that is there, bool[]."""
        ends = self.ends(g, gained)
        with g.within("keep"):
            before = g.op("Sub", g.op("CumSum", g.cast(ends, I64), g.const(0)), g.cast(ends, I64))
            kept = g.total(g.op("Equal", before, g.const(0)), 0)
            ended = g.op("Greater", g.total(ends, 0), g.const(0))
            grown = g.op("Concat", text, g.slice(gained, None, kept), axis=0)
        if self.rules.last is not None:
            places = g.range(g.const(1), g.op("Add", g.size(grown, 0), g.const(1)))
            grown = self.rules.ended(g, grown, g.op("Equal", places, of.limit))
        return grown, ended


@dataclass(frozen=True)
class _Text:
    """A sequence that is written alone. length: of its prompt, i64[]. limit: its tokens at most,
    i64[]. draws: f32[max_new], None where nothing is sampled. read: what states hold of its source.
    source: the tokens of that, where drafts may copy them."""

    length: oir.Value
    limit: oir.Value
    draws: Any
    read: Values
    source: oir.Value | None

    def fed(
        self, g: GraphBuilder, given: Mapping[str, oir.Value], past: oir.Value, count: oir.Value
    ) -> Fed:
        """What a step with `count` i64[] drafted tokens is fed."""
        first, alone = g.op("Less", past, self.length), g.op("Equal", count, g.const(0))
        lone = g.op("And", g.op("Not", first), alone)
        place, most = (g.op("Sub", end, self.length) for end in (past, self.limit))
        return Fed(given, first, lone, place, most)

    def draw(
        self, g: GraphBuilder, text: oir.Value, draft: oir.Value, vocabulary: int
    ) -> Draw | None:
        """What decides the tokens behind the text and behind each token of the draft."""
        if self.draws is None:
            return None
        begun = g.op("Sub", g.size(text, 0), self.length)
        until = g.op("Add", g.op("Add", begun, g.size(draft, 0)), g.const(1))
        seen = seen_after(g, text, draft, vocabulary)
        return Draw(g.op("Unsqueeze", g.slice(self.draws, begun, until), g.const([0])), seen)
