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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16, help="per worker, in windows of 128 characters")
    parser.add_argument("--algorithm", help="gradient_allreduce (default) or bytegrad")
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end")
    return parser.parse_args()


def load_text() -> Tensor:
    """The top-level modules of the standard library, as ASCII codes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files).decode("utf-8", errors="ignore")
    return torch.tensor(list(text.encode("ascii", errors="ignore")), dtype=torch.uint8)


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

    text = load_text()
    torch.manual_seed(rank)  # every worker draws its own windows
    model = CharTransformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = baguarun.DistributedDataParallel(model, optimizers=[optimizer], algorithm=args.algorithm)

    started = time.monotonic()
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(text) - CONTEXT, (args.batch_size, 1))
        windows = text[starts + torch.arange(CONTEXT + 1)].long().to(device)
        logits = model(windows[:, :-1])
        loss = cross_entropy(logits.reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step in (1, args.steps):
            mean_loss = loss.detach().clone()
            dist.all_reduce(mean_loss)
            if rank == 0:
                rate = step * args.batch_size * world_size * CONTEXT / (time.monotonic() - started)
                print(
                    f"step {step:5}/{args.steps}   loss {mean_loss.item() / world_size:.4f}   "
                    f"{rate:7.0f} characters/s",
                    flush=True,
                )

    if rank == 0:
        moved_mb = model.stats().bytes_sent / 1e6
        print(
            f"\n{moved_mb:.1f} MB sent by this worker ({world_size} in all). The model writes:\n", flush=True
        )
        print(write(model.module.eval(), args.sample, device), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
