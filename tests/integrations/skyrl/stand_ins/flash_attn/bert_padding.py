"""Nothing here is called."""

pad_input = unpad_input = None
