#include "tools/cli/cli.h"

int main(int argc, char** argv) { return mla::cli::run_cli(argc, argv); }
