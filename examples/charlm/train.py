"""Trains a character-level transformer on the sources of Python's standard library, then lets it write.

baguarun run --nproc-per-node 2 examples/charlm/train.py --algorithm bytegrad
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import baguarun

VOCABULARY = 128
CONTEXT = 128
PIECE = 4096
VALIDATION_WINDOWS = 128


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker, in windows of 128 characters")
    parser.add_argument("--algorithm", help="a name from docs/algorithms.md (default gradient_allreduce)")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and of the windows drawn")
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end")
    return parser.parse_args()


def load_text() -> Tensor:
    """The top-level modules of the standard library, as ASCII codes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files).decode("utf-8", errors="ignore")
    return torch.tensor(list(text.encode("ascii", errors="ignore")), dtype=torch.uint8)


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """The part to train on and a twentieth that is held out, taken in pieces from all over the text."""
    pieces = text[: len(text) // PIECE * PIECE].view(-1, PIECE)
    held_out = torch.arange(len(pieces)) % 20 == 19
    return pieces[~held_out].flatten(), pieces[held_out].flatten()


def draw(text: Tensor, count: int, length: int, generator: torch.Generator | None = None) -> Tensor:
    """`count` windows of `length` characters and the one that follows, from anywhere in the text."""
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()


class CharTransformer(nn.Module):
    def __init__(self, d_model: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, d_model)
        self.places = nn.Embedding(CONTEXT, d_model)
        layer = nn.TransformerEncoderLayer(
            d_model, heads, 4 * d_model, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY)
        self.register_buffer(
            "mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False
        )

    def forward(self, codes: Tensor) -> Tensor:
        length = codes.shape[1]
        places = torch.arange(length, device=codes.device)
        hidden = self.tokens(codes) + self.places(places)
        hidden = self.blocks(hidden, mask=self.mask[:length, :length], is_causal=True)
        return self.head(self.norm(hidden))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of each window's next characters, in nats."""
    logits = model(windows[:, :-1])
    return cross_entropy(logits.reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))


def mean(value: Tensor) -> float:
    """The mean over all workers."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, device: torch.device) -> float:
    """The mean over all workers, each of which looks at its share with its own replica."""
    windows = draw(text, VALIDATION_WINDOWS, CONTEXT, torch.Generator().manual_seed(0))
    return mean(loss_of(model, windows[dist.get_rank() :: dist.get_world_size()].to(device)))


@torch.no_grad()
def write(model: nn.Module, count: int, device: torch.device) -> str:
    """Let the model continue "def " one character at a time."""
    codes = torch.tensor([list(b"def ")], device=device)
    for _ in range(count):
        odds = model(codes[:, -CONTEXT:])[:, -1].div(0.8).softmax(-1)
        codes = torch.cat([codes, torch.multinomial(odds, 1)], dim=1)
    return bytes(codes[0].tolist()).decode("ascii", errors="replace")


def main() -> None:
    args = parse()
    baguarun.init_process_group()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )

    text, held_out = split(load_text())
    torch.manual_seed(args.seed * world_size + rank)  # every worker draws its own windows
    model = CharTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = baguarun.DistributedDataParallel(model, optimizers=[optimizer], algorithm=args.algorithm)

    started = time.monotonic()
    for step in range(1, args.steps + 1):
        loss = loss_of(model, draw(text, args.batch_size, CONTEXT).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step in (1, args.steps):
            mean_loss = mean(loss)
            if rank == 0:
                rate = step * args.batch_size * world_size * CONTEXT / (time.monotonic() - started)
                print(
                    f"step {step:5}/{args.steps}   loss {mean_loss:.4f}   {rate:7.0f} characters/s",
                    flush=True,
                )

    model.eval()
    final_loss = validation_loss(model.module, held_out, device)
    if rank == 0:
        moved_mb = model.stats().bytes_sent / 1e6
        print(
            f"\nvalidation loss {final_loss:.4f}   {moved_mb:.1f} MB sent by this worker "
            f"({world_size} in all). The model writes:\n",
            flush=True,
        )
        print(write(model.module, args.sample, device), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
