"""What tests of real engines share."""
