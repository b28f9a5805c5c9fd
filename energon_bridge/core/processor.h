/* What the processor has and the system saves, asked with CPUID: `__builtin_cpu_supports` says no to everything where
   Zig's runtime is linked, as it is in the wheels of a release. */
#include <cpuid.h>

enum { CRC = 1, WIDE_CRC = 2, AVX2 = 4, AVX512 = 8 }; /* the last with BW, VBMI and VNNI */

static int instructions(void) {
    static int known = -1; /* asking costs microseconds in a virtual machine */
    unsigned a, b, c, d, saved = 0;
    if (known >= 0)
        return known;
    int has = 0;
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        has = c >> 1 & c >> 19 & 1 ? CRC : 0; /* PCLMULQDQ, SSE4.1 */
        if (c >> 27 & 1)                      /* OSXSAVE */
            __asm__("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
        if ((saved & 0x06) == 0x06 && __get_cpuid_count(7, 0, &a, &b, &c, &d)) {
            has |= b >> 5 & 1 ? AVX2 : 0;
            if ((saved & 0xe6) == 0xe6 && b >> 16 & 1) /* AVX512F */
                has |= (c >> 10 & 1 ? WIDE_CRC : 0) | (b >> 30 & c >> 1 & c >> 11 & 1 ? AVX512 : 0);
        }
    }
    return known = has;
}
