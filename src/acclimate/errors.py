"""Every error that acclimate raises on purpose, so that a caller can catch one kind and let the rest through."""


class AcclimateError(Exception):
    """Base of all errors of this library."""


class InputError(AcclimateError, ValueError):
    """A batch of images that cannot be used. The adapter is as it was before the call."""


class ModelError(AcclimateError, TypeError):
    """A model that cannot be adapted. It is returned to the caller untouched."""


class ConfigError(AcclimateError, ValueError):
    """An unknown method or option, or a value that an option cannot take."""


class StateError(AcclimateError):
    """A state file that cannot be used, or an operation that the adapter's state does not allow."""


class NonFiniteError(AcclimateError, ArithmeticError):
    """An update was about to write NaN or Inf into the model. It was not applied."""


class ConformanceError(AcclimateError, AssertionError):
    """A method does not keep the contract that `acclimate.check_method` verifies."""
