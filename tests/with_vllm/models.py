"""Makes tiny models with random weights, offline. Runs in vLLM's environment.

    models.py DIRECTORY NAME ...

Names: `tiny` (Llama), `other` (the same with other weights), `window` (with sliding windows),
`state` (with recurrent states), `medium` (ten times as large, for benchmarks), `latent` (MLA:
its KV is the same at all ranks), `adapter-a` and `adapter-b` (LoRA, for `tiny`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 501,
    "eos_token_id": 502,
}


def save_tokenizer(directory: Path) -> None:
    vocabulary = {f"t{i}": i for i in range(500)}
    vocabulary.update({"<unk>": 500, "<s>": 501, "</s>": 502})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**COMMON, head_dim=32, initializer_range=0.2))


def medium() -> Any:
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    return LlamaForCausalLM(LlamaConfig(**COMMON | shape, head_dim=64, initializer_range=0.2))


def latent() -> Any:
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            **COMMON | {"num_key_value_heads": 8},
            pad_token_id=500,
            tie_word_embeddings=False,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            first_k_dense_replace=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            n_shared_experts=1,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
            initializer_range=0.2,
        )
    )


def save_adapter(directory: Path) -> None:
    """Of the attention's projections, with weights that change what is said."""
    rank, hidden, sizes = 8, COMMON["hidden_size"], {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    weights = {}
    for layer in range(COMMON["num_hidden_layers"]):
        for name, size in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden, dtype=torch.bfloat16) / 4
            weights[f"{prefix}.lora_B.weight"] = torch.randn(size, rank, dtype=torch.bfloat16) / 4
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 8,
        "target_modules": sorted(sizes), "base_model_name_or_path": "tiny", "lora_dropout": 0.0,
    }  # fmt: skip
    (directory / "adapter_config.json").write_text(json.dumps(config))


def window() -> Any:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON,
            head_dim=32,
            pad_token_id=500,
            tie_word_embeddings=False,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
            initializer_range=0.06,
        )
    )


def state() -> Any:
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **COMMON,
            head_dim=64,
            pad_token_id=500,
            tie_word_embeddings=False,
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
            layer_types=["linear_attention", "full_attention"] * 2,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    )


MAKERS = {
    "tiny": (llama, 0),
    "other": (llama, 1),
    "window": (window, 0),
    "state": (state, 0),
    "medium": (medium, 0),
    "latent": (latent, 0),
}
ADAPTERS = {"adapter-a": 0, "adapter-b": 1}


def main() -> None:
    for name in sys.argv[2:]:
        if name in ADAPTERS:
            torch.manual_seed(ADAPTERS[name])
            save_adapter(Path(sys.argv[1]) / name)
            continue
        maker, seed = MAKERS[name]
        torch.manual_seed(seed)
        directory = Path(sys.argv[1]) / name
        maker().to(torch.bfloat16).save_pretrained(directory)
        save_tokenizer(directory)


if __name__ == "__main__":
    main()
