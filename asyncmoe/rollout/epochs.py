"""Which start of the trainer the controller serves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncmoe.errors import ProtocolError
from asyncmoe.rpc.messages import Hello, TrainerMessage


@dataclass(frozen=True)
class TrainerEpochs:
    """The epochs of the trainer, which grow each time it is started again in place.

    Attributes:
        newest: of any `Hello`; -1: there was none. Older trainers are lost, and whatever they still ask is refused.
        served: of the trainer that was met; -1: none. Less than `newest` while that one is being met.
    """

    newest: int = -1
    served: int = -1

    def check(self, request: TrainerMessage) -> None:
        """Refuse what does not come from the trainer that is served, or from the next one's `Hello`.

        Raises:
            ProtocolError: the request is an older trainer's, or comes before its trainer's `Hello`.
        """
        name = type(request).__name__
        if request.epoch < self.newest:
            raise ProtocolError(
                f"{name}: got it from start {request.epoch} of the trainer, expected start {self.newest}, which has taken its place: "
                "this process is left over and must end"
            )
        if not isinstance(request, Hello) and self.served >= 0 and request.epoch != self.served:
            raise ProtocolError(f"{name}: got it before any Hello of start {request.epoch} of the trainer, expected Hello first")

    def meeting(self, epoch: int) -> TrainerEpochs:
        """The trainer of this epoch is being met: from now on the older ones are refused."""
        return TrainerEpochs(epoch, self.served)

    def met(self) -> TrainerEpochs:
        """The newest trainer was met."""
        return TrainerEpochs(self.newest, self.newest)
