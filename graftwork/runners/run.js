// Runs a plan folder with onnxruntime-node: one sequence, greedy. A port of run.py.
//
// plan.schema.json describes plan.json. One cycle serves all kinds: draft, step, verify, commit.
//
//     npm install onnxruntime-node
//     node run.js FOLDER 1,2,3 32        # a prompt's token ids, and how many more
"use strict";

const fs = require("fs");
const path = require("path");
const ort = require("onnxruntime-node");

const KNOWN = {
  step: ["whole", "fused", "prefilled", "segments"],
  draft: ["none", "suffix", "heads", "fused", "exit"],
  tree: ["chain", "static"],
  verify: ["lossless"],
  depth: ["full", "linear", "decay"],
  cache: ["all"],
  source: ["none"],
};
const ARRAYS = {
  f32: [Float32Array, "float32"],
  f16: [Uint16Array, "float16"],
  i64: [BigInt64Array, "int64"],
  i32: [Int32Array, "int32"],
  u8: [Uint8Array, "uint8"],
};

const sum = (values) => values.reduce((a, b) => a + b, 0);
const range = (count, from = 0) => Array.from({ length: count }, (_, i) => from + i);
const longs = (values, dims) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);

// A draft whose nodes follow one another: tokens, and each one's parent (-1: the text).
const chain = (tokens) => [tokens, range(tokens.length, -1)];

// Columns from..to of a value [1,T,...].
function columns(tensor, from, to) {
  const size = tensor.size / tensor.dims[1];
  const data = tensor.data.slice(from * size, to * size);
  return new ort.Tensor(tensor.type, data, [1, to - from, ...tensor.dims.slice(2)]);
}

class Runner {
  constructor(folder, threads = 1) {
    this.folder = folder;
    this.said = JSON.parse(fs.readFileSync(path.join(folder, "plan.json"), "utf8"));
    if (this.said.format !== "graftwork-plan" || this.said.version !== 1) {
      throw new Error("expected a plan.json of format graftwork-plan, version 1");
    }
    for (const [slot, kind] of this.said.requires.map((entry) => entry.split(":"))) {
      if (KNOWN[slot]?.includes(kind)) continue;
      throw new Error(`this runner does not know ${slot}=${kind}; ${this.said.instead}`);
    }
    this.model = this.said.model;
    this.functions = this.said.functions;
    this.plan = this.said.plan;
    this.parts = this.said.step.decode;
    this.layers = this.parts.map((name) => this.functions[name].layers);
    const levels = this.plan.draft.levels ?? 0;
    this.levels = Math.min(this.plan.tree.depth ?? levels, levels);
    this.paths = this.plan.tree.paths ?? range(this.levels).map((d) => Array(d + 1).fill(0));
    this.options = { intraOpNumThreads: threads, logSeverityLevel: 3 };
    this.sessions = {};
    this.states = {};
    this.steps = 0;
  }

  // A function's session in a variant, what plan.json says of it, and which one it is.
  async session(name, asked) {
    const said = this.functions[name].variants;
    const variant = [asked, "chain", "batch"].find((kind) => kind in said);
    const key = `${name}/${variant}`;
    const file = path.join(this.folder, said[variant].file);
    this.sessions[key] ??= await ort.InferenceSession.create(file, this.options);
    return [this.sessions[key], said[variant], variant];
  }

  // New state buffers of `rows` rows.
  reserve(rows) {
    for (const [name, state] of Object.entries(this.said.states)) {
      const [dtype, inside] = state.type.slice(0, -1).split("[");
      const names = inside.split(",");
      const dims = names.map((d) => (d === "B" ? 1 : d === state.rows ? rows : Number(d)));
      const [array, type] = ARRAYS[dtype];
      const size = dims.reduce((a, b) => a * b, 1);
      const value = new ort.Tensor(type, new array(size), dims);
      this.states[name] = { value, axis: state.rows === null ? null : names.indexOf(state.rows) };
    }
  }

  // Outputs of a function behind `past` rows; its states change in place.
  async call(name, inputs, fetch, past = 0, ancestors = null) {
    let width = Object.values(inputs)[0].dims[1];
    const twice = width === 1 && this.functions[name].lone_token === "twice";
    if (twice) {
      // Kernels add a lone token up in another order.
      const double = (t) =>
        new ort.Tensor(t.type, t.data.constructor.from([...t.data, ...t.data]), [1, 2, ...t.dims.slice(2)]);
      inputs = Object.fromEntries(
        Object.entries(inputs).map(([k, v]) => [k, k === "select" ? v : double(v)])
      );
      width = 2;
    }
    const [session, said, variant] = await this.session(name, ancestors ? "tree" : "chain");
    const mask = ancestors ?? range(width).map((i) => range(width).map((j) => j <= i));
    const given = {
      ...inputs,
      past: longs([past], [1]),
      ancestors: new ort.Tensor("bool", Uint8Array.from(mask.flat()), [1, width, width]),
      seqlens: new ort.Tensor("int32", Int32Array.of(past + width - 1), [1]),
      total: new ort.Tensor(
        "int32",
        Int32Array.of(past + width + Number(variant === "tree" && past === 0)),
        []
      ),
    };
    const feeds = {};
    for (const key of Object.keys(said.inputs)) feeds[key] = this.states[key]?.value ?? given[key];
    const wanted = fetch.filter((key) => key in said.outputs);
    const fetches = Object.fromEntries(wanted.map((key) => [key, null]));
    for (const [key, state] of Object.entries(this.states)) {
      if (`${key}.next` in said.outputs) fetches[`${key}.next`] = state.value;
    }
    const made = await session.run(feeds, fetches);
    const first = (t) => (twice && t.dims[1] === 2 ? columns(t, 0, 1) : t);
    return Object.fromEntries(wanted.map((key) => [key, first(made[key])]));
  }

  // Run the functions of a step on tokens behind `past` rows. chosen: whose logits count.
  async step(functions, tokens, past, fetch, chosen = null, tree = null) {
    const width = tokens.length;
    const depths = range(width).map((i) => (tree ? sum(tree[i].map(Number)) - 1 : i));
    const picked = chosen ?? range(width);
    const inputs = {
      tokens: longs(tokens, [1, width]),
      positions: longs(depths.map((depth) => past + depth), [1, width]),
      select: longs(picked, [1, picked.length]),
    };
    const outputs = {};
    for (const name of functions) {
      Object.assign(outputs, await this.call(name, inputs, fetch, past, tree));
    }
    return outputs;
  }

  // Drafts behind a text, for `room` tokens at most: see `chain`.
  async draft(text, room) {
    return this[`draft_${this.plan.draft.kind}`](text, room);
  }

  draft_none() {
    return chain([]);
  }

  // Copy what followed the most recent of the longest earlier matches of the text's end.
  draft_suffix(text, room) {
    const said = this.plan.draft;
    let [best, at] = [0, 0];
    for (let end = text.length - 1; end > 0 && best < said.longest; end--) {
      let size = 0;
      const most = Math.min(end, said.longest);
      while (size < most && text[end - 1 - size] === text[text.length - 1 - size]) size++;
      if (size > best) [best, at] = [size, end];
    }
    if (best < Math.max(said.shortest, 1)) return chain([]);
    const copied = text.slice(at);
    return chain(range(Math.min(room, said.tokens)).map((i) => copied[i % copied.length]));
  }

  // The nodes of the plan's tree: the candidate of that rank of each depth's head.
  async draft_heads(text, room) {
    const hidden = columns(this.out.hidden, this.column, this.column + 1);
    const said = this.plan.draft;
    const made = (await this.call(said.function, { hidden }, ["draft_tokens"])).draft_tokens;
    const [, , heads, ranks] = made.dims;
    const paths = this.paths.filter((p) => p.length <= Math.min(room, heads));
    const place = new Map([["", -1], ...paths.map((p, index) => [p.join(), index])]);
    return [
      paths.map((p) => Number(made.data[(p.length - 1) * ranks + p[p.length - 1]])),
      paths.map((p) => place.get(p.slice(0, -1).join())),
    ];
  }

  // The step has made it, if it follows the last token that was kept.
  draft_fused(text, room) {
    const made = Array.from(this.out.drafted.data, Number);
    return chain(made[0] === this.column ? made.slice(1, 1 + room) : []);
  }

  // The first layers draft token by token; verification goes on where they stopped.
  async draft_exit(text, room) {
    const said = this.plan.draft;
    const tokens = [text[text.length - 1]];
    this.done = 1 + this.layers.findIndex((_, i) => sum(this.layers.slice(0, i + 1)) >= said.exit);
    for (let i = 0; i <= Math.min(room, this.levels); i++) {
      const last = tokens.slice(-1);
      const first = this.parts.slice(0, this.done);
      const out = await this.step(first, last, text.length - 1 + i, [said.output]);
      const hidden = { hidden: out[said.output] };
      const made = await this.call(said.function, hidden, ["draft_tokens"]);
      tokens.push(Number(made.draft_tokens.data[0]));
    }
    return chain(tokens.slice(1, -1));
  }

  // The functions of a step: all, or the first and as many of the last as layers may run.
  depth(place) {
    const said = this.plan.depth;
    const sizes = this.layers.slice(0, -1);
    if (said.kind === "full") return this.parts.slice(this.done);
    const most = said.most || sum(sizes);
    const budget =
      said.kind === "decay"
        ? Math.max(Math.trunc(sum(sizes) * said.alpha ** place), said.least)
        : Math.trunc(most - (most - said.least) * Math.min(place / said.tokens, 1));
    let [left, last] = [budget - sizes[0], 0];
    while (last < sizes.length - 1 && sizes[sizes.length - 1 - last] <= left) {
      left -= sizes[sizes.length - 1 - last++];
    }
    return [this.parts[0], ...this.parts.slice(this.parts.length - 1 - last)];
  }

  // Row past + i of every state becomes row past + rows[i].
  commit(past, rows) {
    for (const { value, axis } of Object.values(this.states)) {
      if (axis === null) continue;
      const inner = value.dims.slice(axis + 1).reduce((a, b) => a * b, 1);
      const capacity = value.dims[axis];
      for (let from = past * inner; from < value.size; from += capacity * inner) {
        rows.forEach((row, i) => {
          const start = from + row * inner;
          value.data.copyWithin(from + i * inner, start, start + inner);
        });
      }
    }
  }

  // The tokens after a prompt: `count`, or up to one of `eos`, or to the context's end.
  async generate(prompt, count, eos = this.model.eos) {
    const context = this.model.context;
    if (!prompt.length || prompt.length >= context) {
      throw new Error(`expected a prompt of 1 to ${context - 1} tokens, got ${prompt.length}`);
    }
    const text = [...prompt];
    const limit = Math.min(prompt.length + count, context);
    const fetch = ["argmax", "drafted", "hidden"];
    this.reserve(limit + this.said.overhang);
    this.steps = 0;
    this.column = text.length - 1;
    this.out = await this.step(this.said.step.prompt, text, 0, fetch, [this.column]);
    let tokens = [Number(this.out.argmax.data[0])];
    for (;;) {
      text.push(...tokens);
      const end = text.findIndex((t, i) => i >= prompt.length && (eos.includes(t) || i + 1 === limit));
      if (end >= 0) return text.slice(prompt.length, end + 1);
      this.done = 0;
      const past = text.length - 1;
      const [nodes, parents] = await this.draft(text, limit - text.length - 1);
      const tree = range(nodes.length + 1).map((i) => range(nodes.length + 1).map((j) => i === j));
      parents.forEach((parent, i) => {
        tree[i + 1] = tree[i + 1].map((own, j) => own || tree[parent + 1][j]);
      });
      const straight = parents.every((parent, i) => parent === i - 1);
      const functions = this.depth(past - prompt.length);
      const fed = [text[past], ...nodes];
      this.out = await this.step(functions, fed, past, fetch, null, straight ? null : tree);
      const best = Array.from(this.out.argmax.data, Number);
      const kept = [0];
      parents.forEach((parent, i) => {
        const last = kept[kept.length - 1];
        if (parent + 1 === last && nodes[i] === best[last]) kept.push(i + 1);
      });
      if (!straight) this.commit(past, kept);
      tokens = kept.map((node) => best[node]);
      this.column = kept[kept.length - 1];
      this.steps += 1;
    }
  }
}

module.exports = { Runner };

if (require.main === module) {
  const [folder, ids, count] = process.argv.slice(2);
  new Runner(folder)
    .generate(ids.split(",").map(Number), Number(count))
    .then((tokens) => console.log(tokens.join(",")))
    .catch((error) => {
      console.error(error.message);
      process.exitCode = 1;
    });
}
