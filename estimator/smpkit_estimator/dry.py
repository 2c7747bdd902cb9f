"""The cloud of a dry run: where region or credentials are missing, placeholders are used, and notes say so."""

from __future__ import annotations

from smpkit.errors import CloudError
from smpkit_estimator.cloud import Cloud, Identity

__all__ = ["DryCloud"]

_REGION = "<region>"
_ACCOUNT = "000000000000"  # no account has this id, and the patterns of the service accept it


class DryCloud(Cloud):
    """A `Cloud` that uses placeholders where it gets no answer; a request with placeholders cannot start a job."""

    def __init__(self, cloud: Cloud) -> None:
        super().__init__(cloud._session, cloud.clock)
        self.notes: list[str] = []
        """Which placeholders were used, and why."""

    @property
    def region(self) -> str:
        """The region of the session, or a placeholder."""
        known = self._session.region_name
        if not known:
            self._note(f"no AWS region is set: `{_REGION}` stands for it")
        return known or _REGION

    def identity(self) -> Identity:
        """Who calls, or a placeholder where that cannot be found out."""
        try:
            if not self._session.region_name:
                raise CloudError("without a region nobody was asked whose AWS credentials these are")
            return super().identity()
        except CloudError as error:
            self._note(f"{error.message}: `{_ACCOUNT}` stands for the account")
        return Identity(_ACCOUNT, "")

    def role_arn(self, role: str) -> str:
        """The ARN of a role, or a placeholder if it cannot be looked up."""
        if role.startswith("arn:") or self.identity().account != _ACCOUNT:
            return super().role_arn(role)
        return f"arn:aws:iam::{_ACCOUNT}:role/{role}"

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
