"""The decode step under torch.compile: the graph, its operator, and when a graph still fits its model."""
