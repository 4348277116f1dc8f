"""Exceptions of megatron-dcp.

Every message says what was asked, what was found and what to do. `assert` is kept for our own bugs;
whatever a user, a file or a trainer can cause is one of these.
"""

from __future__ import annotations


class MdcpError(Exception):
    """Base class of every error that megatron-dcp raises on purpose."""


class ConfigError(MdcpError):
    """An option, a file or a profile is not usable (bad usage: the command exits with 2)."""


class PlanError(MdcpError):
    """A plan cannot be made, read or run.

    `invariant` names the broken invariant of DESIGN.md section 3 (or None when no plan exists);
    `witness` is the smallest part of the plan that shows it.
    """

    def __init__(
        self, message: str, *, invariant: str | None = None, witness: object = None
    ) -> None:
        self.invariant = invariant
        self.witness = witness
        if invariant is not None:
            message = f"{invariant}: {message}"
        super().__init__(message)


class AdapterError(MdcpError):
    """A trainer cannot be driven: names the trainer, its version and what was looked for."""


class AgreementError(MdcpError):
    """Ranks disagree about the step (digest, lengths or profile); raised before any collective.

    everyone: whether all ranks are in trouble, so that none could have run the step.
    """

    def __init__(self, message: str, *, everyone: bool = False) -> None:
        self.everyone = everyone
        super().__init__(message)


class NonFiniteLossError(MdcpError):
    """The loss of a step is NaN or infinite; names the samples. The optimizer was not stepped."""


class TransferError(MdcpError, RuntimeError):
    """A message between ranks failed or timed out; names what it was for and the peers."""


class OutOfMemoryError(MdcpError):
    """Memory ran out where the step cannot be planned again; says what was expected and held."""
