"""The FedAvg job of compare.py in Flower's simulation; runs in an environment of its own.

Reads a file of arrays (rows, labels, first weights, the order of rows in each round), and writes
the weights it ends with and the seconds of its rounds. No line of atoll is imported here.
"""

import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F  # noqa: N812

SOURCE, TARGET = Path(sys.argv[1]), Path(sys.argv[2])
DEVICE = sys.argv[3] if len(sys.argv) > 3 else "cpu"


def logits(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """An MLP with ReLU."""
    depth = len(weights) // 2
    for i in range(depth):
        x = F.linear(x, weights[f"weight{i}"], weights[f"bias{i}"])
        x = torch.relu(x) if i < depth - 1 else x
    return x


client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """One epoch of SGD over a client's rows."""
    torch.set_num_threads(1)
    place = int(context.node_config["partition-id"])
    number = int(message.content["config"]["server-round"]) - 1
    arrays = np.load(SOURCE)
    x, y = (torch.from_numpy(arrays[f"{name}{place}"]).to(DEVICE) for name in ("x", "y"))
    order, batch = torch.from_numpy(arrays[f"order{place}"][number]), int(arrays["batch"])
    state = message.content["arrays"].to_torch_state_dict()
    weights = {n: w.to(DEVICE).requires_grad_() for n, w in state.items()}
    sgd = torch.optim.SGD(weights.values(), lr=float(arrays["rate"]))
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        sgd.zero_grad()
        F.cross_entropy(logits(weights, x[rows]), y[rows]).backward()
        sgd.step()
    reply = ArrayRecord({n: w.detach().cpu() for n, w in weights.items()})
    metrics = MetricRecord({"num-examples": len(order)})
    return Message(content=RecordDict({"arrays": reply, "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds; nothing is tested in between."""
    arrays = np.load(SOURCE)
    first = {n[2:]: torch.from_numpy(arrays[n]) for n in arrays.files if n.startswith("w/")}
    began = time.perf_counter()
    count = int(arrays["clients"])  # all: it would begin as soon as two are there
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    done = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(first), num_rounds=int(arrays["rounds"])
    )
    seconds = time.perf_counter() - began
    last = {n: w.numpy() for n, w in done.arrays.to_torch_state_dict().items()}
    np.savez(TARGET, seconds=seconds, **last)


if __name__ == "__main__":
    clients = int(np.load(SOURCE)["clients"])
    resources = {"num_cpus": 1, "num_gpus": 0.1 if DEVICE == "cuda" else 0.0}
    run_simulation(server_app, client_app, clients, backend_config={"client_resources": resources})
    peak = sum(resource.getrusage(who).ru_maxrss for who in (0, -1))  # itself, largest child
    print("peak KiB", peak)
