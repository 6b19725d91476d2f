"""The exceptions that a person is meant to read."""


class UserError(Exception):
    """An expected mistake. The message is one sentence that says what is wrong and what to do.

    The command line prints the message alone and exits with code 2; library callers can catch it.
    """


class SaidElsewhere(UserError):
    """A `UserError` that several processes raise and another one of them prints."""


class ProcessLost(Exception):
    """Another process of the run has died. The command line prints the message and exits with code 1."""
