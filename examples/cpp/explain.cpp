// Explains an image with an attribution model compiled by `lrpfx.package`: prediction and relevance, without Python.
//
//     explain model.pt2 image.pgm [class]
//
// The image is a binary PGM file with the model's input size. Without a class, the prediction is explained.

#include <fstream>
#include <iomanip>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

// Pixels in [0, 1], shape (1, 1, height, width).
static at::Tensor read_image(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string magic;
    int64_t width = 0, height = 0, largest = 0;
    if (!(file >> magic >> width >> height >> largest) || magic != "P5" || largest < 1 || largest > 255) {
        throw std::runtime_error(path + " is not a binary PGM file with one byte per pixel");
    }
    file.get();  // the single character between header and pixels
    std::vector<uint8_t> bytes(static_cast<size_t>(width * height));
    if (!file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()))) {
        throw std::runtime_error(path + " is truncated");
    }
    const auto pixels = torch::from_blob(bytes.data(), {1, 1, height, width}, torch::kUInt8);
    return pixels.to(torch::kFloat32) / static_cast<double>(largest);
}

int main(int count, char** arguments) {
    if (count < 3) {
        std::cerr << "usage: explain model.pt2 image.pgm [class]\n";
        return 2;
    }
    try {
        const torch::InferenceMode guard;
        torch::inductor::AOTIModelPackageLoader model(arguments[1]);
        // Inputs must be contiguous: compiled programs silently give wrong results for other memory formats.
        const at::Tensor image = read_image(arguments[2]).contiguous();
        at::Tensor target = torch::full({1}, count > 3 ? std::stoll(arguments[3]) : 0, torch::kInt64);
        // Results are in the order of the manifest: output, relevance, recorded layers.
        std::vector<at::Tensor> results = model.run({image, target});
        if (count == 3) {
            target = results[0].argmax(1);
            results = model.run({image, target});
        }
        std::cout << "prediction " << results[0].argmax(1).item<int64_t>() << "\nexplained " << target.item<int64_t>() << "\n";
        std::cout << std::setprecision(9) << "output " << results[0][0][target.item<int64_t>()].item<float>() << "\nrelevance\n";
        const at::Tensor relevance = results[1].sum({0, 1}).contiguous();
        for (int64_t row = 0; row < relevance.size(0); ++row) {
            for (int64_t column = 0; column < relevance.size(1); ++column) {
                std::cout << relevance[row][column].item<float>() << (column + 1 < relevance.size(1) ? ' ' : '\n');
            }
        }
    } catch (const std::exception& error) {
        std::cerr << "error: " << error.what() << "\n";
        return 1;
    }
    return 0;
}
