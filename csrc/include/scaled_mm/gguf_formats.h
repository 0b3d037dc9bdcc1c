/* The GGUF formats: the one list on the C side. Included by scaled_mm.h; scaled_mm/gguf_formats.py is the same list in Python, and
 * tests/gguf/test_gguf_formats.py compares the two.
 *
 * X(NAME, name, code, bytes, bits, zero, has_minimum):
 *
 *   NAME, name    as in SCALED_MM_DTYPE_<NAME> and in messages
 *   code          the number of SCALED_MM_DTYPE_<NAME>: never changes, a new format takes the next free one
 *   bytes         of a GGUF block: 32 values of a row with their scale
 *   bits          of a stored level: 4, 5 (unsigned) or 8 (signed)
 *   zero          the level that stands for 0; 0 for formats with a minimum, where no fixed level does
 *   has_minimum   1: a minimum follows the scale
 */
#ifndef SCALED_MM_GGUF_FORMATS_H_
#define SCALED_MM_GGUF_FORMATS_H_

/* Formats of a weight. Kernels are built for each of them. */
#define SCALED_MM_GGUF_WEIGHT_FORMATS(X)                                                                                                             \
  X(Q4_0, q4_0, 5, 18, 4, 8, 0)                                                                                                                      \
  X(Q4_1, q4_1, 6, 20, 4, 0, 1)                                                                                                                      \
  X(Q5_0, q5_0, 7, 22, 5, 16, 0)                                                                                                                     \
  X(Q5_1, q5_1, 8, 24, 5, 0, 1)                                                                                                                      \
  X(Q8_0, q8_0, 9, 34, 8, 0, 0)

/* The format of quantized activations. The sum of the 32 values before quantization follows the scale. */
#define SCALED_MM_GGUF_ACTIVATION_FORMATS(X) X(Q8_1, q8_1, 10, 36, 8, 0, 0)

#define SCALED_MM_GGUF_FORMATS(X)                                                                                                                    \
  SCALED_MM_GGUF_WEIGHT_FORMATS(X)                                                                                                                   \
  SCALED_MM_GGUF_ACTIVATION_FORMATS(X)

#endif /* SCALED_MM_GGUF_FORMATS_H_ */
