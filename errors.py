"""The one exception that a user is meant to read."""


class UserError(Exception):
    """Something that the user can mend: the text says what is wrong, where (file and key), and what to do.

    `train.py` prints the text without a traceback and exits with status 2.
    """
