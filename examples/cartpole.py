"""Reinforcement learning in float16 with loss scaling: PPO on a cart-pole that is written in torch.

An actor and a critic have a loss, an optimizer and a loss scale each. Rollouts and evaluations run without gradients at
the same level as training. Rewards, advantages, value targets and log-probabilities stay float32, so the ratio of PPO
compares the policies and not their rounding.
"""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import common
import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_patch as amp

LEVELS = ("O0", "O1", "O4")
CARTS, HORIZON = 64, 32  # of a rollout
LIMIT = 200  # steps of an episode, and with a reward of 1 in each, the best return
EPOCHS, BATCH_SIZE = 4, 512
DISCOUNT, TRACE = 0.99, 0.95
CLIP, MOST_NORM = 0.2, 0.5


class CartPoles:
    """Poles on carts: the equations of Barto, Sutton and Anderson (1983), in steps of 0.02 s.

    Attributes:
        state: `[carts, 4]` float32: place, speed, angle, speed of the angle.
        age: `[carts]` int64: the steps of each episode so far.
    """

    def __init__(self, carts: int, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.state = self._draw(carts, device)
        self.age = torch.zeros(carts, dtype=torch.int64, device=device)

    def _draw(self, carts: int, device: torch.device) -> Tensor:
        return (torch.rand(carts, 4, generator=self._generator) * 0.1 - 0.05).to(device)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Push each cart to the left (0) or right (1): return which poles fell, and which episodes ended.

        An episode that ended starts anew.
        """
        place, speed, angle, turn = self.state.unbind(1)
        force = 20.0 * actions - 10.0
        push = (force + 0.05 * turn**2 * angle.sin()) / 1.1
        turn_change = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        speed_change = push - 0.05 * turn_change * angle.cos() / 1.1
        changes = torch.stack([speed, speed_change, turn, turn_change], dim=1)
        self.state = self.state + 0.02 * changes
        self.age = self.age + 1
        fell = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.2095)
        ended = fell | (self.age >= LIMIT)
        self.state = torch.where(ended[:, None], self._draw(len(ended), ended.device), self.state)
        self.age = self.age * ~ended
        return fell, ended


class Rollout(NamedTuple):
    """What a policy has done: each `[HORIZON * CARTS, ...]`, float32 but for the actions."""

    states: Tensor
    actions: Tensor
    log_probs: Tensor
    advantages: Tensor
    value_targets: Tensor
    ratio_error: float


class Result(NamedTuple):
    """One training: the return of the policy after each update, and what amp says of itself."""

    returns: list[float]
    ratio_error: float
    stats: amp.Stats


def make_network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, outputs))


def get_log_probs(actor: nn.Module, states: Tensor, actions: Tensor) -> Tensor:
    """Return the log-probability of each action, in float32 at every level."""
    log_probs = functional.log_softmax(actor(states).float(), dim=1)
    return log_probs.gather(1, actions[:, None]).squeeze(1)


@torch.no_grad()
def roll_out(poles: CartPoles, actor: nn.Module, critic: nn.Module, generator: torch.Generator) -> Rollout:
    """Drive the carts for some steps, and estimate advantages as of arXiv:1506.02438."""
    states, actions, values, fallen, ended = [], [], [], [], []
    for _ in range(HORIZON):
        states.append(poles.state)
        chances = actor(poles.state).float().softmax(dim=1)
        actions.append(torch.multinomial(chances.cpu(), 1, generator=generator).squeeze(1).to(chances.device))
        values.append(critic(poles.state).float().squeeze(1))
        fell, end = poles.step(actions[-1])
        fallen.append(fell)
        ended.append(end)
    values.append(critic(poles.state).float().squeeze(1))

    advantage = torch.zeros_like(values[0])
    advantages: list[Tensor] = []
    for step in reversed(range(HORIZON)):
        target = 1.0 + DISCOUNT * values[step + 1] * ~ended[step]
        advantage = target - values[step] + DISCOUNT * TRACE * advantage * ~ended[step]
        advantages.insert(0, advantage)

    all_states, all_actions = torch.cat(states), torch.cat(actions)
    all_advantages = torch.cat(advantages)
    log_probs = get_log_probs(actor, all_states, all_actions)
    with amp.disable_casts():
        exact = get_log_probs(actor, all_states, all_actions)
    ratio_error = ((log_probs - exact).exp() - 1).abs().mean().item()
    value_targets = all_advantages + torch.cat(values[:-1])
    normal = (all_advantages - all_advantages.mean()) / all_advantages.std()
    return Rollout(all_states, all_actions, log_probs, normal, value_targets, ratio_error)


@torch.no_grad()
def evaluate(actor: nn.Module, device: torch.device) -> float:
    """Return for how many steps, on average, the most likely actions keep 64 poles up. LIMIT is the best."""
    poles = CartPoles(CARTS, device, seed=1)
    is_up, steps = torch.ones(CARTS, dtype=torch.bool, device=device), 0.0
    for _ in range(LIMIT):
        _, ended = poles.step(actor(poles.state).argmax(dim=1))
        steps += is_up.sum().item()
        is_up = is_up & ~ended
    return steps / CARTS


def train(level: str, updates: int, seed: int, device: torch.device) -> Result:
    """Train a new actor and critic at one level; an update is one rollout and four passes over it."""
    torch.manual_seed(seed)
    actor, critic = make_network(2).to(device), make_network(1).to(device)
    actor_steps = torch.optim.Adam(actor.parameters(), lr=1e-3)
    critic_steps = torch.optim.Adam(critic.parameters(), lr=2e-3)
    (actor, critic), (actor_steps, critic_steps) = amp.initialize(
        [actor, critic], [actor_steps, critic_steps], opt_level=level, num_losses=2, verbosity=0
    )
    poles, generator = CartPoles(CARTS, device, seed), torch.Generator().manual_seed(seed)
    returns, errors = [], []
    for _ in range(updates):
        rollout = roll_out(poles, actor, critic, generator)
        errors.append(rollout.ratio_error)
        for _ in range(EPOCHS):
            for batch in torch.randperm(CARTS * HORIZON, generator=generator).to(device).split(BATCH_SIZE):
                log_probs = get_log_probs(actor, rollout.states[batch], rollout.actions[batch])
                ratio = (log_probs - rollout.log_probs[batch]).exp()
                advantages = rollout.advantages[batch]
                policy_loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
                actor_steps.zero_grad()
                with amp.scale_loss(policy_loss, actor_steps, loss_id=0) as scaled_loss:
                    scaled_loss.backward()
                nn.utils.clip_grad_norm_(amp.master_params(actor_steps), MOST_NORM)
                actor_steps.step()

                values = critic(rollout.states[batch]).squeeze(1)
                value_loss = functional.mse_loss(values, rollout.value_targets[batch])
                critic_steps.zero_grad()
                with amp.scale_loss(value_loss, critic_steps, loss_id=1) as scaled_loss:
                    scaled_loss.backward()
                nn.utils.clip_grad_norm_(amp.master_params(critic_steps), 10 * MOST_NORM)
                critic_steps.step()
        returns.append(evaluate(actor, device))
    result = Result(returns, statistics.fmean(errors), amp.stats())
    amp.reset()
    return result


def draw(results: dict[str, list[Result]], path: Path) -> None:
    """Draw the returns of the first seed over the updates, and how far the ratios are off."""
    figure, (returns, errors) = common.make_figure(2)
    for colour, (level, runs) in zip(common.COLOURS, results.items(), strict=False):
        returns.plot(range(1, len(runs[0].returns) + 1), runs[0].returns, color=colour, label=level)
    returns.set_title("Steps that the pole stays up, seed 0")
    returns.set_xlabel("update")
    returns.legend()
    per_mille = {level: 1000 * runs[0].ratio_error for level, runs in results.items()}
    common.draw_bars(errors, "Error of the ratio, per mille", {"error": per_mille}, "%.2f")
    figure.savefig(path)
    print(f"Returns and errors: {path}")


def get_best(runs: Sequence[Result]) -> float:
    """Return the mean over the seeds of the best policy of each."""
    return statistics.fmean(max(run.returns) for run in runs)


def main(argv: Sequence[str] | None = None) -> int:
    options = common.parse_options(
        __doc__, steps=30, seeds=2, argv=argv, unit="updates, each of a rollout and 16 steps,"
    )
    torch.set_num_threads(1)  # more threads gain nothing on a network of this size
    common.shorten(options, lambda steps: [train(level, steps, 0, options.device) for level in LEVELS])

    table = common.Table("level", "low dtype", "best return", "last", "ratio off by", "skipped", "loss scales")
    results: dict[str, list[Result]] = {}
    for level in LEVELS:
        runs = [train(level, options.steps, seed, options.device) for seed in range(options.seeds)]
        results[level] = runs
        table.print_row(
            level,
            str(runs[0].stats.low_dtype or "-").removeprefix("torch."),
            f"{get_best(runs):.1f}",
            f"{statistics.fmean(run.returns[-1] for run in runs):.1f}",
            f"{statistics.fmean(run.ratio_error for run in runs):.1e}",
            str(sum(run.stats.steps_skipped for run in runs)),
            " ".join(f"{scale:g}" for scale in runs[0].stats.loss_scales),
        )

    print(f"\nReturn: for how many of {LIMIT} steps the pole stays up; the mean of all seeds.")
    print("Ratio off by: how far a probability is from float32's with the same weights, relative to it.")
    if options.plot:
        draw(results, options.plot)
    checks = {
        f"{level}: the best policy keeps the pole up for at least 3/4 of the time of O0's": get_best(results[level])
        >= 0.75 * get_best(results["O0"])
        for level in LEVELS[1:]
    }
    checks["float16 moves the ratio less than bfloat16"] = results["O1"][0].ratio_error < results["O4"][0].ratio_error
    return common.report_checks(checks)


if __name__ == "__main__":
    sys.exit(main())
