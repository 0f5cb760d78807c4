"""Between harnesses and engines: every call recorded token by token before anybody can act on it."""
