"""What users call: load, Decoder, custom_generate."""
