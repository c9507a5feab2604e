"""forerun inside other engines."""
