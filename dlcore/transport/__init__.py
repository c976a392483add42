"""How clients and bookies talk: wire forms, gRPC, and an in-memory stand-in."""
