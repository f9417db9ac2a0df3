"""Whole training programs that are no ``model(batch)``: several networks and optimizers, gradients of gradients, recurrences,
graphs, optimizers written out. Imports torch only.

``PROGRAMS[name](device, large)`` makes the program's state there, drawn alike on every device, and returns one step of it, which
gives a loss. Optimizers keep their step counts on devices other than the CPU, so that steps can be replayed.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Tensor]
Program = Callable[[str, bool], Step]
PROGRAMS: dict[str, Program] = {}


def program(make: Program) -> Program:
    PROGRAMS[make.__name__] = make
    return make


def drawn(device: str, *size: int, seed: int = 1) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device)


def numbers(device: str, bound: int, *size: int, seed: int = 2) -> Tensor:
    return torch.randint(bound, size, generator=torch.Generator().manual_seed(seed)).to(device)


def layers(device: str, *widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    made = [part for wide, narrow in zip(widths, widths[1:]) for part in (nn.Linear(wide, narrow), between())]
    return nn.Sequential(*made[:-1]).to(device)


def adam(parameters: Iterable[Tensor], rate: float = 1e-3, **options: Any) -> torch.optim.Adam:
    parameters = list(parameters)
    return torch.optim.Adam(parameters, rate, capturable=parameters[0].device.type != "cpu", **options)


def learn(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@program
def adversaries(device: str, large: bool) -> Step:
    """A generator and a discriminator, each with an optimizer (Goodfellow et al. 2014)."""
    batch = 256 if large else 8
    maker = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.LeakyReLU(0.2), nn.Linear(256, 784), nn.Tanh()).to(device)
    judge = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to(device)
    makes, judges = adam(maker.parameters(), 2e-4, betas=(0.5, 0.999)), adam(judge.parameters(), 2e-4, betas=(0.5, 0.999))
    real, noise, other = drawn(device, batch, 784), drawn(device, batch, 64, seed=3), drawn(device, batch, 64, seed=4)

    def verdict(images: Tensor, genuine: float) -> Tensor:
        said = judge(images)
        return F.binary_cross_entropy_with_logits(said, torch.full_like(said, genuine))

    def step() -> Tensor:
        return learn(judges, verdict(real, 1) + verdict(maker(noise).detach(), 0)) + learn(makes, verdict(maker(other), 1))

    return step


@program
def soft_actor(device: str, large: bool) -> Step:
    """Soft actor-critic: two critics, slow copies of both, a policy, a temperature (Haarnoja et al. 2018)."""
    batch = 256 if large else 32
    critics = nn.ModuleList([layers(device, 23, 256, 256, 1) for _ in range(2)])
    policy, slow = layers(device, 17, 256, 256, 12), copy.deepcopy(critics)
    heat = torch.zeros(1, device=device, requires_grad=True)
    judges, acts, heats = adam(critics.parameters()), adam(policy.parameters()), adam([heat])
    seen, after = drawn(device, batch, 17), drawn(device, batch, 17, seed=3)
    done, reward = (drawn(device, batch, 1, seed=6) > 1).float(), drawn(device, batch, 1, seed=5)
    taken = drawn(device, batch, 6, seed=4).tanh()
    noise = [drawn(device, batch, 6, seed=seed) for seed in (7, 8)]

    def act(state: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        centre, width = policy(state).chunk(2, -1)
        width = width.clamp(-20, 2)
        action = (centre + width.exp() * drawn).tanh()
        likely = (-0.5 * drawn**2 - width).sum(-1, keepdim=True) - torch.log(1 - action**2 + 1e-6).sum(-1, keepdim=True)
        return action, likely

    def value(judges: nn.ModuleList, state: Tensor, action: Tensor) -> list[Tensor]:
        return [judge(torch.cat([state, action], -1)) for judge in judges]

    def step() -> Tensor:
        with torch.no_grad():
            action, likely = act(after, noise[0])
            target = reward + 0.99 * (1 - done) * (torch.min(*value(slow, after, action)) - heat.exp() * likely)
        judged = learn(judges, sum((F.mse_loss(one, target) for one in value(critics, seen, taken)), heat.new_zeros(())))
        action, likely = act(seen, noise[1])
        acted = learn(acts, (heat.exp().detach() * likely - torch.min(*value(critics, seen, action))).mean())
        heated = learn(heats, -(heat * (likely.detach() - 6)).mean())
        with torch.no_grad():
            for old, new in zip(slow.parameters(), critics.parameters()):
                old.mul_(0.995).add_(new, alpha=0.005)
        return judged + acted + heated

    return step


@program
def learning_to_learn(device: str, large: bool) -> Step:
    """Two steps on each task, and the gradient through both (MAML, Finn et al. 2017)."""
    tasks, points = (8, 512) if large else (3, 10)
    model = layers(device, 1, 40, 40, 1)
    optimizer = adam(model.parameters())
    given = [drawn(device, points, 1, seed=task) for task in range(tasks)]

    def step() -> Tensor:
        losses = []
        for task, x in enumerate(given):
            learned, wanted = dict(model.named_parameters()), torch.sin(x + task)
            for _ in range(2):
                loss = F.mse_loss(torch.func.functional_call(model, learned, x), wanted)
                slopes = torch.autograd.grad(loss, list(learned.values()), create_graph=True)
                learned = {name: one - 0.01 * slope for (name, one), slope in zip(learned.items(), slopes)}
            losses.append(F.mse_loss(torch.func.functional_call(model, learned, x), wanted))
        return learn(optimizer, torch.stack(losses).sum())

    return step


@program
def equation(device: str, large: bool) -> Step:
    """A network that solves Burgers' equation: the loss holds its second derivatives (Raissi et al. 2019)."""
    points = 65536 if large else 100
    model = layers(device, 2, 64, 64, 64, 1, between=nn.Tanh)
    optimizer = adam(model.parameters())
    x, t = drawn(device, points, 1).requires_grad_(), drawn(device, points, 1, seed=3).requires_grad_()

    def step() -> Tensor:
        u = model(torch.cat([x, t], 1))
        u_x, u_t = torch.autograd.grad(u, (x, t), torch.ones_like(u), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, x, torch.ones_like(u), create_graph=True)
        start = model(torch.cat([x, torch.zeros_like(t)], 1)) + torch.sin(torch.pi * x)
        return learn(optimizer, (u_t + u * u_x - 0.01 / torch.pi * u_xx).square().mean() + start.square().mean())

    return step


@program
def flow_of_time(device: str, large: bool) -> Step:
    """A differential equation of a network, ten steps of Runge and Kutta (Chen et al. 2018)."""
    batch, steps = 16384 if large else 16, 10
    model = layers(device, 2, 64, 2, between=nn.Tanh)
    optimizer = adam(model.parameters())
    begin, end = drawn(device, batch, 2), drawn(device, batch, 2, seed=3)

    def step() -> Tensor:
        y, h = begin, 1 / steps
        for _ in range(steps):
            k1 = model(y**3)
            k2 = model((y + h / 2 * k1) ** 3)
            k3 = model((y + h / 2 * k2) ** 3)
            k4 = model((y + h * k3) ** 3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return learn(optimizer, (y - end).abs().mean())

    return step


@program
def tagging(device: str, large: bool) -> Step:
    """A conditional random field over a sequence of tags (Lafferty et al. 2001)."""
    batch, length, tags = (256, 64, 24) if large else (3, 7, 5)
    model, changes = nn.Linear(64, tags).to(device), nn.Parameter(torch.zeros(tags, tags, device=device))
    optimizer = adam([*model.parameters(), changes], 1e-2)
    x, y = drawn(device, batch, length, 64), numbers(device, tags, batch, length)

    def step() -> Tensor:
        scores = model(x)
        so_far = scores[:, 0]
        for place in range(1, length):
            so_far = torch.logsumexp(so_far[:, :, None] + changes + scores[:, place, None, :], 1)
        path = scores.gather(2, y[..., None]).squeeze(-1).sum(1) + changes[y[:, :-1], y[:, 1:]].sum(1)
        return learn(optimizer, (torch.logsumexp(so_far, 1) - path).mean())

    return step


@program
def attention_on_edges(device: str, large: bool) -> Step:
    """A layer of attention between the neighbours of a graph (Velickovic et al. 2018)."""
    nodes, edges, heads, width = (50000, 400000, 4, 16) if large else (20, 60, 2, 4)
    model, out = nn.Linear(heads * width, heads * width, bias=False).to(device), nn.Linear(heads * width, 7).to(device)
    sends, takes = (nn.Parameter(drawn(device, heads, width, seed=seed)) for seed in (8, 9))
    optimizer = adam([*model.parameters(), *out.parameters(), sends, takes], 5e-3)
    x, y = drawn(device, nodes, heads * width), numbers(device, 7, nodes, seed=5)
    source, target = numbers(device, nodes, edges), numbers(device, nodes, edges, seed=4)

    def step() -> Tensor:
        h = model(x).view(nodes, heads, width)
        score = F.leaky_relu((h * sends).sum(-1)[source] + (h * takes).sum(-1)[target], 0.2).exp()
        total = torch.zeros(nodes, heads, device=device).index_add(0, target, score)
        share = score / (total[target] + 1e-16)
        new = torch.zeros(nodes, heads, width, device=device).index_add(0, target, share[..., None] * h[source])
        return learn(optimizer, F.cross_entropy(out(F.elu(new.flatten(1))), y))

    return step


@program
def layers_run_twice(device: str, large: bool) -> Step:
    """A transformer's layers under activation checkpointing, with dropout (Chen et al. 2016)."""
    width, heads, length, batch = (512, 8, 512, 8) if large else (16, 4, 8, 2)
    model = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
                          for _ in range(3)).to(device)  # fmt: skip
    optimizer, x = adam(model.parameters()), drawn(device, batch, length, width)
    torch.manual_seed(1)  # a CPU's generator has drawn the weights, another device's has not

    def step() -> Tensor:
        h = x
        for layer in model:
            h = checkpoint(layer, h, use_reentrant=False)
        return learn(optimizer, h.square().mean())

    return step


@program
def padded_rows(device: str, large: bool) -> Step:
    """An encoder on rows that may be padded, which asks whether they are, as transformers' models do (Devlin et al. 2018)."""
    width, heads, length, batch, words = (512, 8, 512, 8, 8192) if large else (16, 4, 8, 2, 50)
    tokens, places = nn.Embedding(words, width).to(device), nn.Embedding(length, width).to(device)
    parts = [nn.ModuleDict({"n": nn.LayerNorm(width), "in": nn.Linear(width, 3 * width), "out": nn.Linear(width, width),
                            "m": nn.LayerNorm(width), "up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})
             for _ in range(4)]  # fmt: skip
    model, out = nn.ModuleList(parts).to(device), nn.Linear(width, words).to(device)
    optimizer = adam([*tokens.parameters(), *places.parameters(), *model.parameters(), *out.parameters()])
    ids, mask = numbers(device, words, batch, length), torch.ones(batch, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    mask = mask.to(device)

    def step() -> Tensor:
        h = tokens(ids) + places(torch.arange(length, device=ids.device))
        bias = None if mask.all() else mask[:, None, None].bool()
        for part in model:
            q, k, v = part["in"](part["n"](h)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            h = h + part["out"](F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).reshape(batch, length, width))
            h = h + part["down"](F.gelu(part["up"](part["m"](h))))
        with torch.no_grad():
            labels = ids.masked_fill(mask == 0, -100)
        return learn(optimizer, F.cross_entropy(out(h).flatten(0, 1), labels.flatten()))

    return step


@program
def orthogonal_updates(device: str, large: bool) -> Step:
    """Muon, written out: momentum made nearly orthogonal by five products (Jordan et al. 2024)."""
    width, batch = (1024, 4096) if large else (16, 8)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(4)]).to(device)
    momenta = [torch.zeros_like(one) for one in model.parameters()]
    x = drawn(device, batch, width)

    def step() -> Tensor:
        loss = (model(x) - x).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for one, momentum in zip(model.parameters(), momenta):
                assert one.grad is not None
                momentum.lerp_(one.grad, 0.05)
                turn = one.grad.lerp(momentum, 0.95).bfloat16()
                turn = turn / (turn.norm() + 1e-7)
                for _ in range(5):
                    square = turn @ turn.T
                    turn = 3.4445 * turn + (-4.7750 * square + 2.0315 * square @ square) @ turn
                one.mul_(1 - 1e-4).add_(turn.float(), alpha=-0.02)
        return loss.detach()

    return step
