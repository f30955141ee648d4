"""Networks of the public yardsticks, as `model.name = "nets:..."` finds them."""

from torch import nn


def pfl_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The CNN of pfl-research's CIFAR-10 benchmark: 1.63 million weights for 3 x 32 x 32."""
    channels, height, width = shape
    places = ((height - 4) // 2) * ((width - 4) // 2)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * places, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Logistic regression."""
    inputs = 1
    for size in shape:
        inputs *= size
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
