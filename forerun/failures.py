"""Which errors are a request's own, and which are nobody's."""


class NotNumbersError(ValueError):
    """No token can be chosen, as the model's scores are not numbers."""


# These are raised to who takes the step. Every other error ends the request that causes it, and nothing else; that
# includes panics of libraries in Rust, which derive from BaseException.
UNATTRIBUTABLE = (KeyboardInterrupt, SystemExit, GeneratorExit)
