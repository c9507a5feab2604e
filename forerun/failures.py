"""Which errors belong to a request, and which to no request."""


class NotNumbersError(ValueError):
    """No token can be chosen, because the model's scores are not numbers."""


# These propagate to the caller of step(), because no request caused them. Every other error ends
# the request that caused it and nothing else. That includes panics of libraries in Rust, which
# derive from BaseException.
UNATTRIBUTABLE = (KeyboardInterrupt, SystemExit, GeneratorExit)
