"""What `initialize` tells of what it has done: a line for each property that has an effect, and what is slow here."""

from .config import Policy
from .reporting import say, say_once
from .session import Session
from .tables import align


def announce(opened: Session, *, is_known: bool) -> None:
    """Tell of a session that was opened, or in a line of one that was there before and has these models now."""
    policy = opened.policy
    if is_known:
        names = ", ".join(type(model).__name__ for model in opened.models())
        say("amp_patch: opt_level %s as before, for %s", policy.opt_level, names)
        return
    say("amp_patch: opt_level %s, %s", policy.opt_level, policy.description or "no description")
    rows = policy.describe()
    if opened.oplists is not None:
        absent = [entry.op for entry in opened.oplists.missing]
        rows += [("ops that torch lacks", ", ".join(absent))] if absent else []
        rows += [("names patched", str(len(opened.patcher)))]
    for line in align([(name, f": {value}") for name, value in rows], gap=1):
        say("%s", line)
    announce_compute(policy, opened.device_type)


def announce_compute(policy: Policy, device_type: str) -> None:
    """Tell, once in a process, of products that are not computed by instructions made for them."""
    for sentence in policy.explain_compute(device_type):
        say_once(sentence)
