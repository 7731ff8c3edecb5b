"""Linear layers with the same input become one GEMM."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from segue.kernels.linear.fused_linear import FusedPart, fuse, siblings
from segue.kernels.linear.linear import pack_linears


class Block(nn.Module):
    """`a` and `b` (with a bias) see the same tensor, `c` one that is equal to it, `d` comes twice, `tied` shares."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4, bias=False)
        self.b = nn.Linear(8, 6)
        self.c = nn.Linear(8, 4)
        self.d = nn.Linear(8, 4)
        self.tied = nn.Linear(8, 4)
        self.tied_too = nn.Linear(8, 4)
        self.tied_too.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = self.a(x) + self.c(x.clone()) + self.d(x) + self.d(x) + self.tied(x) + self.tied_too(x)
        return torch.cat([same, self.b(x)], dim=-1)


@torch.inference_mode()
def made() -> tuple[nn.Module, torch.Tensor, torch.Tensor, int]:
    torch.manual_seed(0)
    net = nn.Sequential(Block(), nn.Linear(10, 8), Block())
    x = torch.randn(1, 3, 8)
    with siblings(net) as found:
        expected = net(x)
    return net, x, expected, fuse(net, found)


@torch.inference_mode()
def test_what_sees_the_same_tensor_is_fused_and_nothing_else() -> None:
    net, x, expected, count = made()
    assert count == 2
    parts = [name for name, module in net.named_modules() if isinstance(module, FusedPart)]
    assert parts == ["0.a", "0.b", "2.a", "2.b"]
    for _ in range(2):
        torch.testing.assert_close(net(x), expected)
        torch.testing.assert_close(net(x[:, :1]), expected[:, :1])
    assert pack_linears(net, 8) == 2 + 1 + 2 * 4
    torch.testing.assert_close(net(x), expected)


@torch.inference_mode()
def test_parts_in_any_order_and_with_other_inputs() -> None:
    net, x, _, _ = made()
    block = net.get_submodule("0")
    other = x + 1
    wanted = {name: getattr(block, name)(given) for name, given in (("a", x), ("b", other))}
    a, b = block.get_submodule("a"), block.get_submodule("b")
    for name, layer in (("a", a), ("b", b)):
        assert isinstance(layer, FusedPart)
        again = torch.nn.functional.linear(x if name == "a" else other, layer.weight, layer.bias)
        torch.testing.assert_close(again, wanted[name])
    torch.testing.assert_close(b(other), wanted["b"])
    torch.testing.assert_close(a(x), wanted["a"])  # of another input than `b` was
    torch.testing.assert_close(a(x), wanted["a"])  # a second time
    one, two = a(x), b(x)
    one.zero_()
    torch.testing.assert_close(two, b(x))


@torch.inference_mode()
def test_the_input_is_held_no_longer_than_parts_are_due() -> None:
    net, _, _, _ = made()
    x = torch.randn(1, 3, 8)
    gone = weakref.ref(x)
    net.get_submodule("0")(x)
    del x
    assert gone() is None


def test_weights_are_there_once() -> None:
    net = nn.Sequential(Block())
    old = [weakref.ref(net.get_submodule(name).weight) for name in ("0.a", "0.b")]
    before = sum(parameter.numel() for parameter in net.parameters())
    with torch.inference_mode(), siblings(net) as found:
        net(torch.randn(1, 3, 8))
    fuse(net, found)
    assert [reference() for reference in old] == [None, None]
    assert sum(parameter.numel() for parameter in net.parameters()) == before + 4  # a bias of zeros


@torch.inference_mode()
def test_a_layer_that_somebody_watches_stays() -> None:
    net = nn.Sequential(Block())
    seen: list[int] = []
    net.get_submodule("0.b").register_forward_hook(lambda module, given, out: seen.append(1))
    with siblings(net) as found:
        net(torch.randn(1, 3, 8))
    assert fuse(net, found) == 0
    net(torch.randn(1, 3, 8))
    assert len(seen) == 2
