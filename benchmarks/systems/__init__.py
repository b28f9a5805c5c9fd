"""One small runner per system, each started in a fresh process of the environment that has the system."""
