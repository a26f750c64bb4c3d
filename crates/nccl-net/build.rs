//! Keeps the library loaded after NCCL closes it, because the plugin's thread may still be running.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnccl-net-bifrost.so");
    println!("cargo:rerun-if-changed=build.rs");
}
