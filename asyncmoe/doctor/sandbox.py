"""The check of the sandbox in which the tool python runs programs."""

from __future__ import annotations

from asyncmoe.doctor import verdict
from asyncmoe.doctor.facts import Machine, SandboxFacts
from asyncmoe.doctor.verdict import Verdict


def sandbox(machine: Machine) -> Verdict:
    """Check that the default sandbox works here; a run without the tool python, or with another backend, does not need it."""
    found = machine.sandbox
    if found.trouble is None:
        return verdict.ok(f"programs run in a root of their own; {_others(found)}")
    told = f"the default sandbox is refused: {found.trouble}; {_others(found)}"
    hint = found.hint or "choose another environment.sandbox.backend"
    wanted = machine.run.sandbox if machine.run else None
    if wanted == "namespaces":
        return verdict.error(told, hint)
    if wanted is not None:
        return verdict.ok(f"{told}; the configuration asks for {wanted}")
    return verdict.warning(told, f"for the tool python: {hint}")


def _others(found: SandboxFacts) -> str:
    landlock = f"Landlock {found.landlock}" if found.landlock else "no Landlock"
    return f"besides: {', '.join((landlock, *found.programs))}"
