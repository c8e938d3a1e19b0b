// What the processor multiplies bytes with: one struct of each kind, of which `Processor` is this
// one's.
//
// All of them give the same bits: products of bytes are added up exactly, and floats are added by
// fused multiply-adds in the order in which they are called.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int OUTPUTS = 16;  // of a tile
constexpr int STEP = 4;      // values of K whose products with each output are added up at once
constexpr int VECTOR = OUTPUTS * STEP;  // bytes: the weights of a step

// IEEE half precision, as bits, in single precision.
inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, size = half & 0x7fff;
    uint32_t bits = size << 13;
    float value;
    if (size >= 0x7c00) {
        bits |= 0x7f800000;
    } else if (size >= 0x0400) {
        bits += 112u << 23;
    } else {  // subnormal: a whole number of steps
        value = float(size) * 0x1p-24f;
        std::memcpy(&bits, &value, sizeof(bits));
    }
    bits |= sign;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

inline int32_t four_bytes(const int8_t* from) {
    int32_t value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

// A tile's vectors are read in PARTS; `Bytes` are the weights of a step in a part, `Whole` and
// `Real` a number for each of its outputs. Weights are unsigned: `add` takes off `LEFT` first, for
// which its caller makes up. WIDE: weights may take all eight bits, otherwise six. ROWS: of so many
// rows sums fit in registers. `beside`: places are in pairs of bytes, and beside a mark one is looked
// up in the other table. CHAINS: of sums that wait for each other, as many as fill the time.
// `reals<J>` and `look_up<J>` are of byte J of those of each output, the latter in a `Book` of floats.
// MANY_ROWS: where weights may be unpacked once for many rows, sums of so many fit in registers; 0
// where nothing is faster than `add`. `ManyOf` a format: how. From MANY rows on that is faster. A step
// of weights is unpacked to WIDTH lines, each as long as it, a row's values have WIDTH bytes, and its
// `add` takes four bytes of a row and of each output. The products of `limit` lines fit in its sums, of
// which `whole` makes numbers.

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

struct Processor {
    static constexpr const char* NAME = "AVX-512 VNNI";
    typedef __m512i Bytes;
    typedef __m512i Whole;
    typedef __m512 Real;
    static constexpr int PARTS = 1;
    static constexpr int ROWS = 8;
    static constexpr int MANY_ROWS = 0;
    template <class Format>
    struct ManyOf;
    static constexpr int CHAINS = 4;
    template <bool WIDE>
    static constexpr int LEFT = 0;

    static Bytes bytes(const uint8_t* from, int) { return _mm512_loadu_si512(from); }
    static Bytes halves(const uint8_t* from, int) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)from);
        const __m512i low = _mm512_castsi256_si512(both);
        return _mm512_inserti64x4(low, _mm256_srli_epi16(both, 4), 1);
    }
    static Bytes table(const uint8_t* from) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
    }
    static Bytes look_up(Bytes table, Bytes places) { return _mm512_shuffle_epi8(table, places); }
    static Bytes look_up(Bytes table, Bytes other, Bytes places, char mark) {
        const Bytes beside = swapped(places);
        const __mmask64 marked = _mm512_cmpeq_epi8_mask(beside, _mm512_set1_epi8(mark));
        return _mm512_mask_shuffle_epi8(look_up(table, places), marked, other, places);
    }
    static Bytes raised(Bytes places, char mark, char by) {
        const __mmask64 marked = _mm512_cmpeq_epi8_mask(swapped(places), _mm512_set1_epi8(mark));
        return _mm512_mask_add_epi8(places, marked, places, _mm512_set1_epi8(by));
    }
    static Bytes swapped(Bytes value) {
        return _mm512_or_si512(_mm512_slli_epi16(value, 8), _mm512_srli_epi16(value, 8));
    }
    template <int RIGHT>
    static Bytes bits(Bytes value, char mask) {
        if constexpr (RIGHT > 0) value = _mm512_srli_epi16(value, RIGHT);
        if constexpr (RIGHT < 0) value = _mm512_slli_epi16(value, -RIGHT);
        return _mm512_and_si512(value, _mm512_set1_epi8(mask));
    }
    static Bytes both(Bytes a, Bytes b) { return _mm512_or_si512(a, b); }

    static Whole whole(int32_t value) { return _mm512_set1_epi32(value); }
    static Whole sum(Whole a, Whole b) { return _mm512_add_epi32(a, b); }
    template <bool WIDE>
    static void add(Whole& sums, Bytes weights, const int8_t* values) {
        // Compilers load the factor by itself, and copy sums about.
        asm("vpdpbusd %2%{1to16%}, %1, %0"
            : "+v"(sums)
            : "v"(weights), "m"(*(const int8_t(*)[STEP])values));
    }

    static Real real(float value) { return _mm512_set1_ps(value); }
    static Real real(Whole value) { return _mm512_cvtepi32_ps(value); }
    static Real reals(const float* from, int) { return _mm512_loadu_ps(from); }
    static Real reals(const uint16_t* from, int) {
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
    }
    // Byte J of each output's.
    template <int J>
    static Real reals(Bytes value) {
        return _mm512_cvtepi32_ps(bytes_at<J>(value));
    }
    struct Book {
        Real first, second;
        const float* all;
        int count;
    };
    static Book book(const float* from, int count) {
        if (!from) return Book{};
        const Real first =
            _mm512_maskz_loadu_ps(count < OUTPUTS ? (1 << count) - 1 : 0xffff, from);
        const bool two = count == 2 * OUTPUTS;
        return Book{first, two ? _mm512_loadu_ps(from + OUTPUTS) : first, from, count};
    }
    template <int J>
    static Real look_up(const Book& book, Bytes places) {
        const Whole at = bytes_at<J>(places);
        if (book.count <= OUTPUTS) return _mm512_permutexvar_ps(at, book.first);
        if (book.count == 2 * OUTPUTS) return _mm512_permutex2var_ps(book.first, at, book.second);
        return _mm512_i32gather_ps(at, book.all, sizeof(float));
    }
    template <int J>
    static Whole bytes_at(Bytes value) {
        if constexpr (J > 0) value = _mm512_srli_epi32(value, 8 * J);
        return J == 3 ? value : _mm512_and_si512(value, _mm512_set1_epi32(255));
    }
    static Real fused(Real a, Real b, Real c) { return _mm512_fmadd_ps(a, b, c); }
    static Real product(Real a, Real b) { return _mm512_mul_ps(a, b); }
    static Real sum(Real a, Real b) { return _mm512_add_ps(a, b); }
    static void store(float* to, int, Real value) { _mm512_storeu_ps(to, value); }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Processor {
    static constexpr const char* NAME = "AVX2";
    typedef __m256i Bytes;
    typedef __m256i Whole;
    typedef __m256 Real;
    static constexpr int PARTS = 2;
    static constexpr int ROWS = 4;
    static constexpr int MANY_ROWS = 6;
    static constexpr int CHAINS = 1;
    static constexpr int LANES = OUTPUTS / PARTS;
    // Pairs of products are added up in 16 bits. Wide weights are signed ones for that, of which
    // the sign goes to the other factor.
    template <bool WIDE>
    static constexpr int LEFT = WIDE ? 128 : 0;

    static Bytes bytes(const uint8_t* from, int part) {
        return _mm256_loadu_si256((const __m256i*)from + part);
    }
    static Bytes halves(const uint8_t* from, int part) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)from);
        return part ? _mm256_srli_epi16(both, 4) : both;
    }
    static Bytes table(const uint8_t* from) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
    }
    static Bytes look_up(Bytes table, Bytes places) { return _mm256_shuffle_epi8(table, places); }
    static Bytes look_up(Bytes table, Bytes other, Bytes places, char mark) {
        return _mm256_blendv_epi8(
            look_up(table, places), look_up(other, places), marked(places, mark));
    }
    static Bytes raised(Bytes places, char mark, char by) {
        const Bytes more = _mm256_and_si256(marked(places, mark), _mm256_set1_epi8(by));
        return _mm256_add_epi8(places, more);
    }
    static Bytes marked(Bytes places, char mark) {
        const Bytes beside =
            _mm256_or_si256(_mm256_slli_epi16(places, 8), _mm256_srli_epi16(places, 8));
        return _mm256_cmpeq_epi8(beside, _mm256_set1_epi8(mark));
    }
    template <int RIGHT>
    static Bytes bits(Bytes value, char mask) {
        if constexpr (RIGHT > 0) value = _mm256_srli_epi16(value, RIGHT);
        if constexpr (RIGHT < 0) value = _mm256_slli_epi16(value, -RIGHT);
        return _mm256_and_si256(value, _mm256_set1_epi8(mask));
    }
    static Bytes both(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }

    static Whole whole(int32_t value) { return _mm256_set1_epi32(value); }
    static Whole sum(Whole a, Whole b) { return _mm256_add_epi32(a, b); }
    template <bool WIDE>
    static void add(Whole& sums, Bytes weights, const int8_t* values) {
        __m256i factor = _mm256_set1_epi32(four_bytes(values));
        if constexpr (WIDE) {
            const __m256i own = _mm256_xor_si256(weights, _mm256_set1_epi8(char(128)));
            factor = _mm256_sign_epi8(factor, own);
            weights = _mm256_abs_epi8(own);
        }
        const __m256i pairs = _mm256_maddubs_epi16(weights, factor);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }

    // Two ports multiply, and `add` has two or three things for them to do. Here it is one: weights
    // of more than four bits are widened, products of others added up in 16 bits for some lines.
    template <bool WIDENED>
    struct Many {
        static constexpr int WIDTH = WIDENED ? 2 : 1;
        static constexpr int MANY = WIDENED ? 12 : 4;

        static constexpr int64_t limit(int bits) {
            return WIDENED ? INT64_MAX / 2 : INT16_MAX / (2 * 127 * ((1 << bits) - 1));
        }
        // What line `which` has of a step: of each output two values, less `left`, or all four.
        static Bytes unpacked(Bytes step, int which, int left) {
            if constexpr (!WIDENED) return step;
            const __m128i pair =
                _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
            if (which) step = _mm256_srli_epi32(step, 16);
            const Bytes both = _mm256_shuffle_epi8(step, _mm256_broadcastsi128_si256(pair));
            return _mm256_sub_epi16(both, _mm256_set1_epi16(int16_t(left)));
        }
        static Bytes zero() { return _mm256_setzero_si256(); }
        static void add(Bytes& sums, Bytes weights, const int8_t* values) {
            const Bytes factor = _mm256_set1_epi32(four_bytes(values));
            Bytes products;
            // Sums fill the registers, and compilers keep all products before they add one.
            if constexpr (WIDENED)
                asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0"
                    : "+x"(sums), "=&x"(products)
                    : "x"(weights), "x"(factor));
            else
                asm("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
                    : "+x"(sums), "=&x"(products)
                    : "x"(weights), "x"(factor));
        }
        static Whole whole(Bytes sums) {
            return WIDENED ? sums : _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
        }
    };
    template <class Format>
    using ManyOf = Many<(Format::WIDE || Format::NUMBER > 4)>;

    static Real real(float value) { return _mm256_set1_ps(value); }
    static Real real(Whole value) { return _mm256_cvtepi32_ps(value); }
    static Real reals(const float* from, int part) { return _mm256_loadu_ps(from + part * LANES); }
    static Real reals(const uint16_t* from, int part) {
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from + part));
    }
    template <int J>
    static Real reals(Bytes value) {
        return _mm256_cvtepi32_ps(bytes_at<J>(value));
    }
    struct Book {
        const float* all;
    };
    static Book book(const float* from, int) { return {from}; }
    template <int J>
    static Real look_up(const Book& book, Bytes places) {
        return _mm256_i32gather_ps(book.all, bytes_at<J>(places), sizeof(float));
    }
    template <int J>
    static Whole bytes_at(Bytes value) {
        if constexpr (J > 0) value = _mm256_srli_epi32(value, 8 * J);
        return J == 3 ? value : _mm256_and_si256(value, _mm256_set1_epi32(255));
    }
    static Real fused(Real a, Real b, Real c) { return _mm256_fmadd_ps(a, b, c); }
    static Real product(Real a, Real b) { return _mm256_mul_ps(a, b); }
    static Real sum(Real a, Real b) { return _mm256_add_ps(a, b); }
    static void store(float* to, int part, Real value) {
        _mm256_storeu_ps(to + part * LANES, value);
    }
};

#else

struct Processor {
    static constexpr const char* NAME = "plain C++";
    struct Bytes {
        uint8_t at[VECTOR];
    };
    struct Whole {
        int32_t at[OUTPUTS];
    };
    struct Real {
        float at[OUTPUTS];
    };
    static constexpr int PARTS = 1;
    static constexpr int ROWS = 2;
    static constexpr int MANY_ROWS = 0;
    template <class Format>
    struct ManyOf;
    static constexpr int CHAINS = 1;
    template <bool WIDE>
    static constexpr int LEFT = 0;

    static Bytes bytes(const uint8_t* from, int) {
        Bytes value;
        std::memcpy(value.at, from, VECTOR);
        return value;
    }
    static Bytes halves(const uint8_t* from, int) {
        Bytes value;
        for (int i = 0; i < VECTOR / 2; i++) {
            value.at[i] = from[i];
            value.at[i + VECTOR / 2] = from[i] >> 4;
        }
        return value;
    }
    static Bytes table(const uint8_t* from) {
        Bytes value = {};
        std::memcpy(value.at, from, 16);
        return value;
    }
    static Bytes look_up(const Bytes& table, Bytes places) {
        for (int i = 0; i < VECTOR; i++) places.at[i] = table.at[places.at[i] & 15];
        return places;
    }
    static Bytes look_up(const Bytes& table, const Bytes& other, const Bytes& places, char mark) {
        Bytes found;
        for (int i = 0; i < VECTOR; i++)
            found.at[i] = (places.at[i ^ 1] == mark ? other : table).at[places.at[i] & 15];
        return found;
    }
    static Bytes raised(const Bytes& places, char mark, char by) {
        Bytes found = places;
        for (int i = 0; i < VECTOR; i++)
            if (places.at[i ^ 1] == mark) found.at[i] = uint8_t(places.at[i] + by);
        return found;
    }
    template <int RIGHT>
    static Bytes bits(Bytes value, char mask) {
        for (int i = 0; i < VECTOR; i++) {
            const int moved = RIGHT > 0 ? value.at[i] >> (RIGHT > 0 ? RIGHT : 0)
                                        : value.at[i] << (RIGHT < 0 ? -RIGHT : 0);
            value.at[i] = uint8_t(moved & mask);
        }
        return value;
    }
    static Bytes both(Bytes a, const Bytes& b) {
        for (int i = 0; i < VECTOR; i++) a.at[i] |= b.at[i];
        return a;
    }

    static Whole whole(int32_t value) {
        Whole all;
        for (int n = 0; n < OUTPUTS; n++) all.at[n] = value;
        return all;
    }
    static Whole sum(Whole a, const Whole& b) {
        for (int n = 0; n < OUTPUTS; n++) a.at[n] += b.at[n];
        return a;
    }
    template <bool WIDE>
    static void add(Whole& sums, const Bytes& weights, const int8_t* values) {
        for (int n = 0; n < OUTPUTS; n++)
            for (int k = 0; k < STEP; k++)
                sums.at[n] += int32_t(weights.at[n * STEP + k]) * values[k];
    }

    static Real real(float value) {
        Real all;
        for (int n = 0; n < OUTPUTS; n++) all.at[n] = value;
        return all;
    }
    static Real real(const Whole& value) {
        Real all;
        for (int n = 0; n < OUTPUTS; n++) all.at[n] = float(value.at[n]);
        return all;
    }
    static Real reals(const float* from, int) {
        Real all;
        std::memcpy(all.at, from, sizeof(all));
        return all;
    }
    static Real reals(const uint16_t* from, int) {
        Real all;
        for (int n = 0; n < OUTPUTS; n++) all.at[n] = half_to_float(from[n]);
        return all;
    }
    template <int J>
    static Real reals(const Bytes& value) {
        Real all;
        for (int n = 0; n < OUTPUTS; n++) all.at[n] = value.at[n * STEP + J];
        return all;
    }
    struct Book {
        const float* all;
    };
    static Book book(const float* from, int) { return {from}; }
    template <int J>
    static Real look_up(const Book& book, const Bytes& places) {
        Real all;
        for (int n = 0; n < OUTPUTS; n++) all.at[n] = book.all[places.at[n * STEP + J]];
        return all;
    }
    static Real fused(const Real& a, const Real& b, Real c) {
        for (int n = 0; n < OUTPUTS; n++) c.at[n] = std::fma(a.at[n], b.at[n], c.at[n]);
        return c;
    }
    static Real product(Real a, const Real& b) {
        for (int n = 0; n < OUTPUTS; n++) a.at[n] *= b.at[n];
        return a;
    }
    static Real sum(Real a, const Real& b) {
        for (int n = 0; n < OUTPUTS; n++) a.at[n] += b.at[n];
        return a;
    }
    static void store(float* to, int, const Real& value) {
        std::memcpy(to, value.at, sizeof(value.at));
    }
};

#endif

}  // namespace
