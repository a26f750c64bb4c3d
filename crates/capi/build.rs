//! Gives the shared library its name for the dynamic linker: the number changes when programs must be compiled again.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libbifrost_rdm.so.0");
    println!("cargo:rerun-if-changed=build.rs");
}
