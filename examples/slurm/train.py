"""Train a language model that may be preempted at any time: `smpkit submit examples/slurm/job.yaml`."""

import argparse
import os
import socket
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import smpkit.torch as smp

BYTES = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="sequences per replica and step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--checkpoints", type=Path, default=os.environ.get("SMPKIT_CHECKPOINT_DIR", "runs/checkpoints"))
    return parser.parse_known_args()[0]  # a launcher may add arguments of its own


class Net(nn.Module):
    """Scores `[batch, context, 256]` of the byte that follows each of `[batch, context]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.write = nn.Embedding(BYTES, width), nn.Linear(width, BYTES)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(4)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.read(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.write(hidden)


@smp.step
def train_step(model: smp.DistributedModel, tokens: Tensor) -> Tensor:
    loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    model.backward(loss)
    return loss


def main() -> None:
    arguments = parse_arguments()
    smp.init()
    smp.stop_requested()  # from here on SIGTERM ends the loop below, not the process
    torch.manual_seed(0)
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in modules)), dtype=torch.uint8).long()

    model = smp.DistributedModel(Net(arguments.width))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    step = 0
    if smp.latest_checkpoint(arguments.checkpoints):
        step = smp.resume_from_checkpoint(arguments.checkpoints)["step"]
    places = smp.allgather(f"{smp.rank()} on {socket.gethostname()}")
    if smp.rank() == 0:
        print(f"ranks {', '.join(places)}; from step {step}", flush=True)

    saved = step
    while step < arguments.steps and not smp.stop_requested():
        draw = torch.Generator().manual_seed(step * smp.dp_size() + smp.dp_rank())
        starts = torch.randint(len(text) - arguments.context - 1, (arguments.batch,), generator=draw)
        tokens = text[starts[:, None] + torch.arange(arguments.context + 1)]
        optimizer.zero_grad()
        loss = train_step(model, tokens).reduce_mean()
        optimizer.step()
        step += 1
        smp.log({"loss": loss}, step, mean_over=smp.DP_GROUP)
        if smp.rank() == 0 and step % 50 == 0:
            print(f"step {step}  loss {loss.item():.3f}", flush=True)
        if step % arguments.save_every == 0:
            smp.save_checkpoint(arguments.checkpoints, f"step_{step}", user_content={"step": step})
            saved = step
    if saved != step:  # the last step, or the one at which the job was told to stop
        smp.save_checkpoint(arguments.checkpoints, f"step_{step}", user_content={"step": step})
    if smp.rank() == 0:
        print(f"done at step {step} of {arguments.steps}", flush=True)


if __name__ == "__main__":
    main()
