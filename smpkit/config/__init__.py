"""What a user may say: closed, frozen models of the configuration, and the way from files to them."""
