"use strict";

const USAGE = `Runs a plan folder with onnxruntime-node: one sequence, greedy. A port of run.py.

plan.schema.json describes plan.json. Each cycle: draft, step, verify, commit.

    npm install onnxruntime-node
    node run.js FOLDER 1,2,3 32        # token ids of a prompt or source, number of new tokens
    node run.js FOLDER sound.f32 32    # features of a source, raw float32`;

if (require.main === module && process.argv.length !== 5) {  // before imports that may fail
  const asked = process.argv.includes("-h") || process.argv.includes("--help");
  (asked ? console.log : console.error)(USAGE);
  process.exit(asked ? 0 : 2);
}

const crypto = require("crypto");
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
  source: ["none", "encoded"],
  states: ["recurrent"],
};
const ARRAYS = {
  f32: [Float32Array, "float32"],
  f16: [Uint16Array, "float16"],
  i64: [BigInt64Array, "int64"],
  i32: [Int32Array, "int32"],
  u8: [Uint8Array, "uint8"],
  bool: [Uint8Array, "bool"],
};

const sum = (values) => values.reduce((a, b) => a + b, 0);
const range = (count, from = 0) => Array.from({ length: count }, (_, i) => from + i);
const longs = (values, dims) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);

// The dims in a type such as f32[B,T,64].
const dimsOf = (type) => type.slice(type.indexOf("[") + 1, -1).split(",");

// A chain draft: tokens, and the parent of each (-1: the text).
const chain = (tokens) => [tokens, range(tokens.length, -1)];

// Columns from..to of a value [1,T,...].
function columns(tensor, from, to) {
  const size = tensor.size / tensor.dims[1];
  const data = tensor.data.slice(from * size, to * size);
  return new ort.Tensor(tensor.type, data, [1, to - from, ...tensor.dims.slice(2)]);
}

// Read and check plan.json.
function readPlan(file) {
  const text = fs.readFileSync(file, "utf8");
  const plan = JSON.parse(text);
  if (plan.format !== "graftwork-plan" || plan.version !== 1) {
    throw new Error("expected a plan.json of format graftwork-plan, version 1");
  }
  for (const [slot, kind] of plan.requires.map((entry) => entry.split(":"))) {
    if (Object.hasOwn(KNOWN, slot) && KNOWN[slot].includes(kind)) continue;
    throw new Error(`this runner does not know ${slot}=${kind}; ${plan.instead}`);
  }
  // The hash of a file in which zeros stand for it.
  const zeroed = text.replace(plan.sha256, "0".repeat(64));
  if (crypto.createHash("sha256").update(zeroed).digest("hex") !== plan.sha256) {
    throw new Error(`${file} is damaged: its sha256 is another; export it again`);
  }
  for (const { variants } of Object.values(plan.functions)) {
    for (const variant of Object.values(variants)) {
      if (/^[0-9]+\.[a-z]+\.onnx$/.test(variant.file)) continue;
      throw new Error(`${file} names ${variant.file}, no file of this folder`);
    }
  }
  return plan;
}

class Runner {
  constructor(folder, threads = 1) {
    this.folder = folder;
    this.file = readPlan(path.join(folder, "plan.json"));
    this.model = this.file.model;
    this.functions = this.file.functions;
    this.plan = this.file.plan;
    this.parts = this.file.step.decode;
    this.layers = this.parts.map((name) => this.functions[name].layers);
    const levels = this.plan.draft.levels ?? 0;
    this.levels = Math.min(this.plan.tree.depth ?? levels, levels);
    this.paths = this.plan.tree.paths ?? range(this.levels).map((d) => Array(d + 1).fill(0));
    this.options = { intraOpNumThreads: threads, logSeverityLevel: 3 };
    this.sessions = {};
    this.states = {};
    this.steps = 0;
  }

  // A function's session, its entry in plan.json, and its variant.
  async session(name, asked) {
    const variants = this.functions[name].variants;
    const variant = [asked, "chain", "batch"].find((kind) => kind in variants);
    const key = `${name}/${variant}`;
    const file = path.join(this.folder, variants[variant].file);
    this.sessions[key] ??= await ort.InferenceSession.create(file, this.options);
    return [this.sessions[key], variants[variant], variant];
  }

  // Allocate states with `rows` rows for a text and `source` rows for its source: each with the
  // value that is read, and the next one.
  reserve(rows, source) {
    const log = Math.max(this.file.step.most_columns - 1, 1); // a step's first token is certain
    const sizes = { B: 1, E: source, W: log };
    for (const [name, state] of Object.entries(this.file.states)) {
      const [array, type] = ARRAYS[state.type.slice(0, state.type.indexOf("["))];
      const names = dimsOf(state.type);
      const dims = names.map((d) => (/^[0-9]+$/.test(d) ? Number(d) : sizes[d] ?? rows));
      const size = dims.reduce((a, b) => a * b, 1);
      const made = () => new ort.Tensor(type, new array(size), dims);
      const axis = state.rows === null ? null : names.indexOf(state.rows);
      const value = made();
      this.states[name] = { value, next: state.in_place ? value : made(), axis, rows: state.rows };
    }
  }

  // Run a function after `past` rows; updates its states.
  async call(name, inputs, fetch, past = 0, ancestors = null) {
    let width = Object.values(inputs)[0].dims[1];
    const twice = width === 1 && this.functions[name].lone_token === "twice";
    if (twice) {
      // Kernels for one token sum in another order.
      const double = (t) =>
        new ort.Tensor(t.type, t.data.constructor.from([...t.data, ...t.data]), [1, 2, ...t.dims.slice(2)]);
      inputs = Object.fromEntries(
        Object.entries(inputs).map(([k, v]) => [
          k,
          k === "select" || v.dims.length < 2 ? v : double(v),
        ])
      );
      width = 2;
    }
    const [session, entry, variant] = await this.session(name, ancestors ? "tree" : "chain");
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
    for (const key of Object.keys(entry.inputs)) feeds[key] = this.states[key]?.value ?? given[key];
    const wanted = fetch.filter((key) => key in entry.outputs);
    const fetches = Object.fromEntries(wanted.map((key) => [key, null]));
    for (const [key, state] of Object.entries(this.states)) {
      if (`${key}.next` in entry.outputs) fetches[`${key}.next`] = state.next;
    }
    const made = await session.run(feeds, fetches);
    for (const [key, state] of Object.entries(this.states)) {
      if (`${key}.next` in entry.outputs) [state.value, state.next] = [state.next, state.value];
    }
    const first = (t) => (twice && t.dims[1] === 2 ? columns(t, 0, 1) : t);
    return Object.fromEntries(wanted.map((key) => [key, first(made[key])]));
  }

  // Encode a source into the states: token ids, or features (`most` rows).
  async encode(name, source, most) {
    const given = (await this.session(name, "chain"))[1].inputs;
    let [first, rows] = [null, source.length];
    if ("features" in given) {
      const dims = [1, ...dimsOf(given.features).slice(1).map(Number)];
      first = { features: new ort.Tensor("float32", Float32Array.from(source), dims) };
      rows = most;
    } else {
      first = { tokens: longs(source, [1, rows]), positions: longs(range(rows), [1, rows]) };
    }
    await this.call(name, { ...first, lengths: longs([rows], [1]) }, []);
  }

  // Run the functions of a step on tokens after `past` rows. chosen: columns with logits. certain:
  // number of tokens that are final.
  async step(functions, tokens, past, fetch, chosen = null, tree = null, certain = 1) {
    const width = tokens.length;
    const depths = range(width).map((i) => (tree ? sum(tree[i].map(Number)) - 1 : i));
    const picked = chosen ?? range(width);
    const inputs = {
      tokens: longs(tokens, [1, width]),
      positions: longs(depths.map((depth) => past + depth), [1, width]),
      select: longs(picked, [1, picked.length]),
      certain: longs([certain], [1]),
    };
    const outputs = {};
    for (const name of functions) {
      Object.assign(outputs, await this.call(name, inputs, fetch, past, tree));
    }
    return outputs;
  }

  // A draft of at most `room` tokens: see `chain`.
  async draft(text, room) {
    return this[`draft_${this.plan.draft.kind}`](text, room);
  }

  draft_none() {
    return chain([]);
  }

  // Copy the tokens after the most recent of the longest earlier matches of the text's suffix.
  draft_suffix(own, room) {
    const record = this.plan.draft;
    const text = [...this.readable, ...own];
    let [best, at] = [0, 0];
    for (let end = text.length - 1; end > 0 && best < record.longest; end--) {
      let size = 0;
      const most = Math.min(end, record.longest);
      while (size < most && text[end - 1 - size] === text[text.length - 1 - size]) size++;
      if (size > best) [best, at] = [size, end];
    }
    if (best < Math.max(record.shortest, 1)) return chain([]);
    const copied = text.slice(at);
    return chain(range(Math.min(room, record.tokens)).map((i) => copied[i % copied.length]));
  }

  // The plan's tree, filled with the candidates of each depth's head by rank.
  async draft_heads(text, room) {
    const hidden = columns(this.out.hidden, this.column, this.column + 1);
    const record = this.plan.draft;
    const made = (await this.call(record.function, { hidden }, ["draft_tokens"])).draft_tokens;
    const [, , heads, ranks] = made.dims;
    const paths = this.paths.filter((p) => p.length <= Math.min(room, heads));
    const place = new Map([["", -1], ...paths.map((p, index) => [p.join(), index])]);
    return [
      paths.map((p) => Number(made.data[(p.length - 1) * ranks + p[p.length - 1]])),
      paths.map((p) => place.get(p.slice(0, -1).join())),
    ];
  }

  // Made by the step; valid if it follows the last accepted token.
  draft_fused(text, room) {
    const made = Array.from(this.out.drafted.data, Number);
    return chain(made[0] === this.column ? made.slice(1, 1 + room) : []);
  }

  // The first layers draft token by token; verification continues from their states.
  async draft_exit(text, room) {
    const record = this.plan.draft;
    const tokens = [text[text.length - 1]];
    this.done = 1 + this.layers.findIndex((_, i) => sum(this.layers.slice(0, i + 1)) >= record.exit);
    for (let i = 0; i <= Math.min(room, this.levels); i++) {
      const last = tokens.slice(-1);
      const first = this.parts.slice(0, this.done);
      const out = await this.step(first, last, text.length - 1 + i, [record.output]);
      const hidden = { hidden: out[record.output] };
      const made = await this.call(record.function, hidden, ["draft_tokens"]);
      tokens.push(Number(made.draft_tokens.data[0]));
    }
    return chain(tokens.slice(1, -1));
  }

  // The functions of a step: all, or the first and as many of the last as the budget of layers.
  depth(place) {
    const record = this.plan.depth;
    const sizes = this.layers.slice(0, -1);
    if (record.kind === "full") return this.parts.slice(this.done);
    const most = record.most || sum(sizes);
    const budget =
      record.kind === "decay"
        ? Math.max(Math.trunc(sum(sizes) * record.alpha ** place), record.least)
        : Math.trunc(most - (most - record.least) * Math.min(place / record.tokens, 1));
    let [left, last] = [budget - sizes[0], 0];
    while (last < sizes.length - 1 && sizes[sizes.length - 1 - last] <= left) {
      left -= sizes[sizes.length - 1 - last++];
    }
    return [this.parts[0], ...this.parts.slice(this.parts.length - 1 - last)];
  }

  // Compact the accepted rows of the last step; logs begin after its first row.
  commit(past, path) {
    for (const { value, axis, rows } of Object.values(this.states)) {
      if (axis === null || rows === "E") continue;
      const kept = rows === "W" ? path.slice(1).map((row) => row - 1) : path;
      const inner = value.dims.slice(axis + 1).reduce((a, b) => a * b, 1);
      const capacity = value.dims[axis];
      const begin = rows === "W" ? 0 : past * inner;
      for (let from = begin; from < value.size; from += capacity * inner) {
        kept.forEach((row, i) => {
          const start = from + row * inner;
          value.data.copyWithin(from + i * inner, start, start + inner);
        });
      }
    }
  }

  // The most likely token after each column of the last step, except suppressed ones.
  best(never) {
    if (!never.length) return Array.from(this.out.argmax.data, Number);
    const { data, dims } = this.out.logits;
    return range(dims[1]).map((column) => {
      const scores = data.slice(column * dims[2], (column + 1) * dims[2]);
      for (const token of never) scores[token] = -Infinity;
      return scores.indexOf(scores.reduce((a, b) => Math.max(a, b), -Infinity));
    });
  }

  // The initial text and its maximum length; allocates states. With an encoder, the prompt is the
  // source.
  async begun(prompt, count, begin) {
    const { function: encoder, most, vocabulary, start } = this.plan.source;
    const context = this.model.context;
    let [text, rows] = [[...prompt], 1];
    this.readable = [];
    if (encoder) {
      rows = vocabulary ? prompt.length : most;
      if (!rows || rows > most) {
        throw new Error(`expected a source of 1 to ${most} tokens, got ${rows}`);
      }
      if (vocabulary && vocabulary <= this.model.vocab_size) this.readable = text;
      text = [...(begin ?? start)];
    }
    if (!text.length || text.length >= context) {
      throw new Error(`expected a prompt of 1 to ${context - 1} tokens, got ${text.length}`);
    }
    const limit = Math.min(text.length + count, context);
    this.reserve(limit + this.file.overhang, rows);
    if (encoder) await this.encode(encoder, prompt, most);
    return [text, limit];
  }

  // The tokens after a prompt: `count`, or up to one of `eos` or the context's end. begin: initial
  // tokens of a text with a source; default: the plan's.
  async generate(prompt, count, eos = this.model.eos, begin = null) {
    const rules = this.model.generation;
    const { chunk, prompt: functions } = this.file.step;
    const [text, limit] = await this.begun(prompt, count, begin);
    const [first, never] = [text.length, rules.suppress_tokens ?? []];
    const fetch = ["argmax", "drafted", "hidden"];
    if (never.length || "begin_suppress_tokens" in rules) fetch.push("logits");
    if (first === 1 && "forced_bos_token_id" in rules) text.push(rules.forced_bos_token_id);
    this.steps = 0;
    for (let past = 0; past < text.length; past += chunk) {
      const part = text.slice(past, past + chunk);
      this.column = part.length - 1;
      this.out = await this.step(functions, part, past, fetch, [this.column], null, part.length);
    }
    const notFirst = text.length === first ? rules.begin_suppress_tokens ?? [] : [];
    let tokens = this.best([...never, ...notFirst]);
    for (;;) {
      text.push(...tokens);
      const end = text.findIndex((t, i) => i >= first && (eos.includes(t) || i + 1 === limit));
      if (end >= 0) {
        if (end + 1 === limit) text[end] = rules.forced_eos_token_id ?? text[end];
        return text.slice(first, end + 1);
      }
      this.done = 0;
      const past = text.length - 1;
      const [nodes, parents] = await this.draft(text, limit - text.length - 1);
      const tree = range(nodes.length + 1).map((i) => range(nodes.length + 1).map((j) => i === j));
      parents.forEach((parent, i) => {
        tree[i + 1] = tree[i + 1].map((own, j) => own || tree[parent + 1][j]);
      });
      const straight = parents.every((parent, i) => parent === i - 1);
      const fed = [text[past], ...nodes];
      const shape = straight ? null : tree;
      this.out = await this.step(this.depth(past - first), fed, past, fetch, null, shape);
      const best = this.best(never);
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

async function main([folder, given, count]) {
  const floats = (bytes) => new Float32Array(new Uint8Array(bytes).buffer);
  const numbers = [...given.split(","), count];
  if (fs.existsSync(given)) numbers.splice(0, numbers.length - 1);
  if (!numbers.every((text) => /^-?[0-9]+$/.test(text))) {
    throw new Error("expected token ids, as 1,2,3, and a number of tokens");
  }
  const prompt = fs.existsSync(given) ? floats(fs.readFileSync(given)) : given.split(",").map(Number);
  return new Runner(folder).generate(prompt, Number(count));
}

if (require.main === module) {
  main(process.argv.slice(2))
    .then((tokens) => console.log(tokens.join(",")))
    .catch((error) => {
      console.error(`${process.argv[2]} cannot be run: ${error.message.replace(/\s+/g, " ")}`);
      process.exitCode = 1;
    });
}
