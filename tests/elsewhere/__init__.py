"""The demo and the tests on other Pythons, and in surroundings that users have."""
