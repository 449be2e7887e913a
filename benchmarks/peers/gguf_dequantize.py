"""Write a quantised GGUF again with plain matrices, for llama.cpp.

python -m benchmarks.peers.gguf_dequantize IN.gguf OUT.gguf bf16|f32

Vectors stay float32. Rows keep llama.cpp's order, so nothing else changes. Needs the
packages gguf and numpy.
"""

import argparse

import gguf
import numpy as np

TYPES = {
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}


def main() -> None:
    """Copy the settings and convert the tensors."""
    parser = argparse.ArgumentParser(description="Dequantise a GGUF file.")
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("type", choices=TYPES)
    arguments = parser.parse_args()
    matrix_type, file_type = TYPES[arguments.type]
    reader = gguf.GGUFReader(arguments.source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(arguments.target, architecture)
    for name, field in reader.fields.items():
        # The writer makes these itself.
        if name.startswith("GGUF.") or name in (
            "general.architecture",
            "general.file_type",
        ):
            continue
        kind = field.types[0]
        is_array = kind == gguf.GGUFValueType.ARRAY
        item_kind = field.types[-1] if is_array else None
        writer.add_key_value(name, field.contents(), kind, sub_type=item_kind)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1 or arguments.type == "f32":
            writer.add_tensor(tensor.name, values)
        else:
            data = gguf.quantize(values, matrix_type)
            writer.add_tensor(tensor.name, data, raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
