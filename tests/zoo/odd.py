"""Small models that each do one odd thing."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.zoo.base import Case, Lit, mapped, vectors

FEATURES, TARGETS, WIDTH = 12, 4, 16


class Residual(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(self.norm(x)))


class Regression(Lit):
    """`embed`, some blocks, `head`; what the models do with them differs."""

    depth = 4

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([self.block(i) for i in range(self.depth)])
        self.head = nn.Linear(WIDTH, TARGETS)

    def block(self, i: int) -> nn.Module:
        return Residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss


class SequentialMLP(Lit):
    """Everything in one Sequential; blocks are the odd layers out."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(FEATURES, WIDTH), nn.ReLU()]
        for _ in range(4):
            layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, TARGETS))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.log_dict({"train_loss": loss, "twice": 2 * loss})
        return {"loss": loss}


class NoTrunk(Lit):
    """No list of blocks at all."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, WIDTH)
        self.fc2 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc3 = nn.Linear(2 * WIDTH, WIDTH)
        self.fc4 = nn.Linear(WIDTH, TARGETS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = torch.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        x = torch.relu(self.fc3(x))
        loss = F.mse_loss(self.fc4(x), y)
        self.log("train_loss", loss)
        return loss


class TupleBlock(Residual):
    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        out = super().forward(x + 0.1 * memory)
        return out, memory + out.detach()


class TupleBlocks(Regression):
    """Blocks return two values that both go on."""

    def block(self, i: int) -> nn.Module:
        return TupleBlock()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        memory = torch.zeros_like(x)
        for block in self.blocks:
            x, memory = block(x, memory)
        return self.head(x + memory)


class DictBlock(Residual):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        out = super().forward(state["hidden"])
        return {"hidden": out, "depth": state["depth"] + 1, "history": [*state["history"], out.mean(dim=-1)]}


class DictBlocks(Regression):
    """Blocks take and return a dict that grows: tensors, an int and a list."""

    def block(self, i: int) -> nn.Module:
        return DictBlock()

    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": self.embed(x), "depth": 0, "history": []}
        for block in self.blocks:
            state = block(state)
        history = torch.stack(state["history"], dim=-1)
        return self.head(state["hidden"]) / state["depth"] + history


class KeywordBlock(Residual):
    def forward(
        self, hidden: Tensor, *, mask: Tensor | None = None, index: int = 0, mode: str = "add", cache: Any = None
    ) -> tuple[Tensor, None, int, str]:
        out = super().forward(hidden)
        if mode == "scaled":
            out = out / (1 + index)
        if mask is not None:
            out = out * mask
        return out, None, index + 1, "scaled" if index % 2 else "add"


class KeywordBlocks(Regression):
    """Keyword arguments, None, ints and strings go from block to block."""

    def block(self, i: int) -> nn.Module:
        return KeywordBlock()

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.sum(dim=-1, keepdim=True) > 0).to(x.dtype) + 0.5
        h, cache, index, mode = self.embed(x), None, 0, "add"
        for i, block in enumerate(self.blocks):
            h, cache, index, mode = block(hidden=h, mask=mask if i % 2 else None, index=index, mode=mode, cache=cache)
        assert cache is None
        return self.head(h) * index


class ModuleDictTrunk(Lit):
    """The trunk's elements are never called themselves, only what is in them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(WIDTH),
                    "up": nn.Linear(WIDTH, 2 * WIDTH),
                    "act": nn.GELU(),
                    "down": nn.Linear(2 * WIDTH, WIDTH),
                }
            )
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, TARGETS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x)
        for layer in self.layers:
            h = layer["up"](layer["norm"](x))
            x = x + layer["down"](layer["act"](h))
        loss = F.mse_loss(self.head(x), y)
        self.log("train_loss", loss)
        return loss


class NestedLists(Lit):
    """ModuleLists in a ModuleList, with None where a level has no second part."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList()
        for i in range(4):
            extra = nn.Linear(WIDTH, WIDTH) if i % 2 == 0 else None
            self.layers.append(nn.ModuleList([Residual(), extra, Residual()]))
        self.head = nn.Linear(WIDTH, TARGETS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x)
        for first, extra, second in self.layers:
            x = first(x)
            if extra is not None:
                x = F.silu(extra(x))
            x = second(x)
        loss = F.mse_loss(self.head(x), y)
        self.log("train_loss", loss)
        return loss


class InPlaceBlock(nn.Module):
    """Its first operation changes its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(x))


class InPlace(Regression):
    """Activations are changed in place, by blocks and between them."""

    def block(self, i: int) -> nn.Module:
        return InPlaceBlock()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            h = block(x)
            h += 0.5
            x = h.mul_(1.5)
        return self.head(x)


class DetachedSkip(Regression):
    """A skip that carries no gradient, over all blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        first = self.blocks[0](x)
        h = first
        for block in self.blocks[1:]:
            h = block(h)
        return self.head(h * torch.sigmoid(first.detach()))


class DeepSupervision(Regression):
    """Every block's output has a loss; the head is called after each."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h, losses = self.embed(x), []
        for block in self.blocks:
            h = block(h)
            losses.append(F.mse_loss(self.head(h), y))
        loss = torch.stack(losses).mean()
        self.log("train_loss", loss)
        self.log("last_loss", losses[-1])
        return loss


class AutoEncoder(Lit):
    """The loss needs the inputs, changed by a function, on the last stage; more losses than one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.code = nn.Linear(WIDTH, 3)
        self.decoder = nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.out = nn.Linear(WIDTH, FEATURES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        clean = torch.sin(x)
        code = self.code(self.encoder(x))
        loss = F.mse_loss(self.out(self.decoder(code)), clean) + 0.1 * code.pow(2).mean()
        self.log("train_loss", loss)
        return loss


class Temperature(Regression):
    """A bare parameter used before the first block, after the last and in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.temperature) / self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y) * self.temperature.exp() + (self.temperature - 1) ** 2
        self.log("train_loss", loss)
        return loss


class BufferOnTwoStages(Regression):
    """A buffer read before, between and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x) + self.scale
        return self.head(x / self.scale)


class Parametrized(Regression):
    """Weights that are computed from others (weight norm) and a registered forward hook."""

    def block(self, i: int) -> nn.Module:
        block = Residual()
        nn.utils.parametrizations.weight_norm(block.fc)
        block.register_forward_hook(lambda module, args, output: output * 0.9)
        return block


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList([Residual() for _ in range(6)])
        self.head = nn.Linear(WIDTH, TARGETS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.Sequential(*self.blocks)(self.embed(x)))


class Wrapped(Lit):
    """The user's own wrappers round the model; a Sequential made on the fly; an option that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Wrapper(Wrapper(Inner()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x=x), y)
        self.log("train_loss", loss)
        return loss


class NestedBatch(Regression):
    """A batch in a structure of its own, with strings, None and a number in it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.cat(batch["inputs"]["halves"], dim=-1)
        sign = torch.tensor([1.0 if name.startswith("plus") else -1.0 for name in batch["names"]], device=x.device)
        assert batch["nothing"] is None
        target, (weight,) = batch["target"]
        out = self(x) * sign.to(x.dtype)[:, None]
        loss = ((out - target).pow(2).mean(dim=-1) * weight).mean() * batch["factor"]
        self.log("train_loss", loss)
        return loss


def _nested(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    x, y = batch
    names = ["plus" if i % 3 else "minus" for i in range(x.size(0))]
    sign = torch.tensor([1.0 if name == "plus" else -1.0 for name in names], dtype=y.dtype)
    return {
        "inputs": {"halves": (x[:, : FEATURES // 2], x[:, FEATURES // 2 :])},
        "names": names,
        "nothing": None,
        "factor": 0.5,
        "target": [y * sign[:, None], (1.0 + torch.arange(x.size(0), dtype=y.dtype) / x.size(0),)],
    }


_vectors = vectors(FEATURES, TARGETS)

CASES = [
    Case("sequential", SequentialMLP, _vectors, 4, "one Sequential; the step returns a dict; log_dict"),
    Case("no_trunk", NoTrunk, _vectors, 2, "four different layers, no list"),
    Case("tuple_blocks", TupleBlocks, _vectors, 4, "blocks that return tuples"),
    Case("dict_blocks", DictBlocks, _vectors, 4, "blocks that return dicts with ints and lists in them"),
    Case("keyword_blocks", KeywordBlocks, _vectors, 4, "keywords, None, ints, strings"),
    Case("module_dict_trunk", ModuleDictTrunk, _vectors, 4, "trunk elements used piece by piece"),
    Case("nested_lists", NestedLists, _vectors, 4, "ModuleLists with None in a ModuleList"),
    Case("in_place", InPlace, _vectors, 4, "in-place operations on activations, received ones too"),
    Case("detached_skip", DetachedSkip, _vectors, 4, "a skip without gradient"),
    Case("deep_supervision", DeepSupervision, _vectors, 4, "a loss after every block; the head called on each"),
    Case("auto_encoder", AutoEncoder, _vectors, 2, "two Sequentials; the loss needs the inputs"),
    Case("temperature", Temperature, _vectors, 4, "a glue parameter on first and last stage and in the step"),
    Case("buffer", BufferOnTwoStages, _vectors, 4, "a buffer read on all stages"),
    Case("parametrized", Parametrized, _vectors, 4, "weight norm, the user's own forward hooks"),
    Case("wrapped", Wrapped, _vectors, 6, "wrappers round the model; a Sequential made on the fly"),
    Case("nested_batch", NestedBatch, mapped(_vectors, _nested), 4, "nested batches with strings, None and a number"),
]
