"""What few bits gain a mixture of experts: milliseconds a token, and bytes of weights.

    python benchmarks/random_moe.py --recipes baseline,int8,int4 --rounds 5 --threads 1

A Qwen3-MoE of random weights is made in memory. Systems decode in turns; medians without the first
round. Prints a line of JSON for each recipe and target.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import graftwork as gw


def random_moe(layers: int, experts: int, chosen: int, hidden: int) -> torch.nn.Module:
    """The model; experts have half as many values as the residual stream."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=chosen,
        vocab_size=4096,
        max_position_embeddings=512,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
    )
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config, trust_remote_code=False
    ).eval()
    return model


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", default="baseline,int8,int4")
    parser.add_argument("--targets", default="onnxruntime:cpu:float32,torch:cpu:float32")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--chosen", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = random_moe(given.layers, given.experts, given.chosen, given.hidden)
    prompt = torch.randint(3, 4000, (1, 32))
    asked = {"max_new_tokens": given.tokens + 1, "do_sample": False, "eos_token_id": []}
    for target in given.targets.split(","):
        where = gw.Target.parse(target, threads=given.threads)
        made = {name: gw.optimize(model, name, target=where) for name in given.recipes.split(",")}
        times: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(given.rounds):
            for name, fast in made.items():
                fast.forget()
                found = fast.generate(prompt, return_dict_in_generate=True, **asked)
                times[name].append(found.stats.decode_seconds / given.tokens * 1e3)
        for name, fast in made.items():
            line = {
                "target": target,
                "recipe": name,
                "ms_a_token": round(statistics.median(times[name][1:]), 2),
                "weights_mb": round(fast.report.memory().weights / 1e6, 1),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
