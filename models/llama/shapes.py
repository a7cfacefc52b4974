"""The published Llama shapes, and the small ones for tests."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of the low rotary frequencies to a longer context (arXiv 2407.21783, section 3.4)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class LlamaShape:
    """Everything that fixes the mathematics of a Llama model but not its weights. Sizes in elements."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int = 128256
    head_dim: int = 128
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = False


# Llama 3 (arXiv 2407.21783, table 3); 3.1 adds the rotary scaling, 3.2 the two small tied models.
FLAVORS: dict[str, LlamaShape] = {
    "debugmodel": LlamaShape(256, 4, 8, 4, 768, vocab_size=2048, head_dim=32),
    "300M": LlamaShape(1024, 16, 16, 8, 3584, vocab_size=16384, head_dim=64),
    "1B": LlamaShape(2048, 16, 32, 8, 8192, head_dim=64, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "3B": LlamaShape(3072, 28, 24, 8, 8192, rope_scaling=RopeScaling(factor=32.0), tie_embeddings=True),
    "8B": LlamaShape(4096, 32, 32, 8, 14336),
    "70B": LlamaShape(8192, 80, 64, 8, 28672),
    "3.1-8B": LlamaShape(4096, 32, 32, 8, 14336, rope_scaling=RopeScaling(factor=8.0)),
    "3.1-70B": LlamaShape(8192, 80, 64, 8, 28672, rope_scaling=RopeScaling(factor=8.0)),
    "405B": LlamaShape(16384, 126, 128, 8, 53248, rope_scaling=RopeScaling(factor=8.0)),
}


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained, and which tokenizer it reads with."""

    name: Literal["llama3"] = "llama3"
    """Model family."""
    flavor: Literal["debugmodel", "300M", "1B", "3B", "8B", "70B", "3.1-8B", "3.1-70B", "405B"] = "debugmodel"
    """Shape: 8B and 70B are Llama 3; 3.1-8B, 3.1-70B and 405B are Llama 3.1; 1B and 3B are Llama 3.2."""
    n_layers: int | None = None
    """Build this many layers instead of the flavor's."""
    vocab_size: int | None = None
    """Rows of the embedding and of the output head, instead of the flavor's."""
    tokenizer_path: str | None = None
    """A tokenizer.json, a sentencepiece .model, or a folder with one; none: a BPE learned once from the standard
    library."""

    def problems(self) -> list[tuple[str, str]]:
        found = []
        if self.n_layers is not None and self.n_layers < 1:
            found.append(("n_layers", f"{self.n_layers} layers make no model; give 1 or more, or none"))
        if self.vocab_size is not None and self.vocab_size < 1:
            found.append(("vocab_size", f"{self.vocab_size} is no vocabulary; give 1 or more, or none"))
        return found

    def shape(self) -> LlamaShape:
        """The flavor's shape with this section's changes."""
        shape = FLAVORS[self.flavor]
        if self.n_layers is not None:
            shape = replace(shape, n_layers=self.n_layers)
        if self.vocab_size is not None:
            shape = replace(shape, vocab_size=self.vocab_size)
        return shape
