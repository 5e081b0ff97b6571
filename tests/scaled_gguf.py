"""A GGUF file's weights in a file that says its positions are scaled by YaRN: what `--rope-factor` does, in the file.

``python tests/scaled_gguf.py SOURCE TARGET FACTOR``; with a target's passkeys, far behind the source's context:
``questkv eval passkey --model TARGET --lengths 14000``.
"""

from __future__ import annotations

import sys
from pathlib import Path


def write_scaled(source: Path, target: Path, factor: float) -> Path:
    """Copy metadata and tensors, still quantised, and add YaRN's keys."""
    import gguf

    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    context = reader.fields[f"{architecture}.context_length"].contents()
    writer = gguf.GGUFWriter(str(target), architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", f"{architecture}.context_length"):
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    writer.add_context_length(int(context * factor))
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(factor)
    writer.add_rope_scaling_orig_ctx_len(context)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


if __name__ == "__main__":
    print(write_scaled(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
