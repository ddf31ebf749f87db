"""What a user did wrong, and what the program found broken. The command line prints either as one line."""


class UserError(ValueError):
    """The user's mistake: the message names the value, the bound and the remedy, in one line. Exit code 2."""
