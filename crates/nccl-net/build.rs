//! Keeps the library in memory when NCCL closes it: a thread of it may be running.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-bifrost.so");
    println!("cargo:rerun-if-changed=build.rs");
}
