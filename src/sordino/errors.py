"""What Sordino raises when it will not go on.

Every message is one line that says what was wrong, with the value and the name
of the layer or option, and what to do instead. The command line prints the
message alone and exits with code 2.
"""


class SordinoError(ValueError):
    """A mistake in what was asked for: one line, the value and the remedy."""


class Unsupported(SordinoError):
    """A combination nobody has proved (or written) yet; names the part that is missing."""


class StateError(SordinoError):
    """A saved run that cannot be continued: corrupt, foreign, changed or in use."""


class PrivacyError(SordinoError):
    """Going on would break the guarantee: one example could move more than the bound."""
