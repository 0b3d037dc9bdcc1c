"""llama.cpp's block formats: quantizers, dequantizers, products and GGUF files."""
