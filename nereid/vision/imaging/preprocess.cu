// A batch of images of any sizes into the network's input: turn, resize, crop or pad, normalise, lay out.
//
// Compiled per model with -DFILTER=, -DDATATYPE= and -DLAYOUT=, whose values are the names of structs below. A
// thread makes one pixel of the tensor from all source pixels of its window, in Pillow's order: along the
// rows, rounded to 8 bits, then down the columns. No headers: CuPy's wheels bring none.
// kernel.py fills the first structs. Source of the taps: Pillow, src/libImaging/Resample.c.
struct Axis {          // one axis of an upright image
    double scale;      // source pixels per output
    double widening;   // of the filter, so that it covers all that one output shrinks
    long long stride;  // bytes from one source pixel to the next; negative where the image is flipped
    int size;          // source pixels
    int offset;        // which output of the resized image comes first
    int at;            // where in the tensor that one goes
    int count;         // outputs; those outside are padding
};

struct Image {
    const unsigned char *origin;  // R, G, B of the upright image's first pixel
    Axis rows, columns;
};

struct Channel {
    float padding;  // the value outside the image
    float mean, factor;
    int at;  // place in the tensor
};

struct Channels { Channel rgb[3]; };

struct box {
    static constexpr double support = 0.5;
    __device__ static float weight(float) { return 1; }  // the window ends where the box does
};

struct bilinear {
    static constexpr double support = 1;
    __device__ static float weight(float x) { return fmaxf(0, 1 - fabsf(x)); }
};

struct bicubic {
    static constexpr double support = 2;
    __device__ static float weight(float x) {
        x = fabsf(x);
        if (x < 1) return (1.5f * x - 2.5f) * x * x + 1;
        return x < 2 ? ((-0.5f * x + 2.5f) * x - 4) * x + 2 : 0;
    }
};

struct lanczos {
    static constexpr double support = 3;
    __device__ static float sinc(float x) { return x == 0 ? 1 : sinpif(x) / (3.14159265f * x); }
    __device__ static float weight(float x) { return fabsf(x) < 3 ? sinc(x) * sinc(x / 3) : 0; }
};

struct FP32 {
    typedef float Element;
    __device__ static Element from(float value) { return value; }
};

struct FP16 {
    typedef unsigned short Element;
    __device__ static Element from(float value) {
#ifdef __CUDACC__
        Element half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
        return half;
#else
        return host_half(value);
#endif
    }
};

struct UINT8 {
    typedef unsigned char Element;
    __device__ static Element from(float value) { return (Element)value; }
};

struct NCHW {
    __device__ static long long place(int y, int x, int channel, int height, int width) {
        return ((long long)channel * height + y) * width + x;
    }
};

struct NHWC {
    __device__ static long long place(int y, int x, int channel, int, int width) {
        return ((long long)y * width + x) * 3 + channel;
    }
};

struct Window {  // the source pixels that weigh in one output
    int first, end;
    float start, step;  // position of the first of them in the filter, and their distance there

    __device__ Window(const Axis &axis, int output) {
        // In double: a float cannot resolve the ends of a window in a large image.
        double centre = (axis.offset + output - axis.at + 0.5) * axis.scale;
        double reach = FILTER::support * axis.widening;
        first = max((int)(centre - reach + 0.5), 0);
        end = min((int)(centre + reach + 0.5), axis.size);
        start = (float)((first + 0.5 - centre) / axis.widening);
        step = (float)(1 / axis.widening);
    }

    __device__ float weight(int pixel) const { return FILTER::weight(start + (pixel - first) * step); }
    __device__ float norm() const {
        float sum = 0;
        for (int pixel = first; pixel < end; ++pixel) sum += weight(pixel);
        return 1 / sum;
    }
};

__device__ static bool shows(const Axis &axis, int output) {
    return output >= axis.at && output < axis.at + axis.count;
}

__device__ static float level(float value) { return fminf(fmaxf(floorf(value + 0.5f), 0), 255); }

__device__ static void resample(const Image &image, const Window &rows, const Window &columns, float *rgb) {
    float row_norm = rows.norm(), column_norm = columns.norm();
    for (int row = rows.first; row < rows.end; ++row) {
        const unsigned char *pixel = image.origin + row * image.rows.stride;
        pixel += columns.first * image.columns.stride;
        float across[3] = {0, 0, 0};
        for (int column = columns.first; column < columns.end; ++column, pixel += image.columns.stride) {
            float weight = columns.weight(column);
            for (int c = 0; c < 3; ++c) across[c] += weight * pixel[c];
        }
        float weight = rows.weight(row);
        for (int c = 0; c < 3; ++c) rgb[c] += weight * level(across[c] * column_norm);
    }
    for (int c = 0; c < 3; ++c) rgb[c] = level(rgb[c] * row_norm);
}

// Grid: x and y cover the tensor's width and height, z is the image.
extern "C" __global__ void preprocess(
    const Image *images, Channels channels, DATATYPE::Element *tensor, int height, int width) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    const Image &image = images[blockIdx.z];
    bool is_inside = shows(image.rows, y) && shows(image.columns, x);
    float rgb[3] = {0, 0, 0};
    if (is_inside) resample(image, Window(image.rows, y), Window(image.columns, x), rgb);
    tensor += 3LL * height * width * blockIdx.z;
    for (int c = 0; c < 3; ++c) {
        const Channel &channel = channels.rgb[c];
        float value = is_inside ? (rgb[c] - channel.mean) * channel.factor : channel.padding;
        tensor[LAYOUT::place(y, x, channel.at, height, width)] = DATATYPE::from(value);
    }
}
