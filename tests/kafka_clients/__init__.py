"""Programs over clients of Kafka's protocol, and what builds and runs them."""
