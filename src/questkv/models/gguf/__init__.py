"""GGUF files: their header, what it says about positions, and the model folder that is made of one and kept."""
