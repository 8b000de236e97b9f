package evernear;

import io.netty.channel.ChannelDuplexHandler;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.ChannelPromise;
import io.netty.handler.codec.http.DefaultFullHttpResponse;
import io.netty.handler.codec.http.HttpContent;
import io.netty.handler.codec.http.HttpHeaderNames;
import io.netty.handler.codec.http.HttpRequest;
import io.netty.handler.codec.http.HttpResponseStatus;
import io.netty.handler.codec.http.HttpUtil;
import io.netty.handler.codec.http.HttpVersion;
import io.netty.util.AttributeKey;
import io.netty.util.ReferenceCountUtil;
import java.util.List;
import java.util.Set;
import java.util.concurrent.TimeUnit;
import org.pytorch.serve.util.TokenAuthorization;
import org.pytorch.serve.util.TokenAuthorization.TokenType;

/**
 * Admits requests by their head. Before any part of the body is stored, the request must be well-formed, have the
 * token, and fit into the limit on in-flight bytes. A rejection closes the connection.
 */
final class Admission extends ChannelDuplexHandler {
    // Set until TorchServe responds.
    private static final AttributeKey<Object> SESSION = AttributeKey.valueOf("session");

    private final int maxBytes;
    private final Set<TokenType> tokens;
    private final boolean hasProbe;
    private int receivedBytes;
    private int reservedBytes;
    private boolean rejected;

    /** Requires one of {@code tokens}, if any. With {@code hasProbe}, probes need no token. */
    Admission(int maxBytes, Set<TokenType> tokens, boolean hasProbe) {
        this.maxBytes = maxBytes;
        this.tokens = tokens;
        this.hasProbe = hasProbe;
    }

    @Override
    public void channelRead(ChannelHandlerContext context, Object message) {
        if (!rejected && isAdmitted(context, message)) {
            context.fireChannelRead(message);
        } else {
            ReferenceCountUtil.release(message);
        }
    }

    private boolean isAdmitted(ChannelHandlerContext context, Object message) {
        try {
            admit(context, message);
            return true;
        } catch (RejectedException rejection) {
            rejected = true;
            context.writeAndFlush(rejection.response());
            return false;
        }
    }

    private void admit(ChannelHandlerContext context, Object message) {
        if (message instanceof HttpRequest) {
            HttpRequest request = (HttpRequest) message;
            Head.check(request);
            checkToken(request);
            reserve(Long.parseLong(request.headers().get(HttpHeaderNames.CONTENT_LENGTH, "0")));
            if (HttpUtil.is100ContinueExpected(request)) {
                request.headers().remove(HttpHeaderNames.EXPECT);
                context.writeAndFlush(new DefaultFullHttpResponse(HttpVersion.HTTP_1_1, HttpResponseStatus.CONTINUE));
            }
        }
        if (message instanceof HttpContent) {
            HttpContent content = (HttpContent) message;
            if (!content.decoderResult().isSuccess()) {
                throw new RejectedException(
                        HttpResponseStatus.BAD_REQUEST,
                        "BadRequest",
                        "The body cannot be read: " + content.decoderResult().cause().getMessage() + ".");
            }
            receivedBytes += content.content().readableBytes();
            reserve(receivedBytes);
        }
    }

    private void checkToken(HttpRequest request) {
        if (tokens.isEmpty() || !TokenAuthorization.isEnabled() || hasProbe && Probe.isProbe(request)) {
            return;
        }
        List<String> headers = request.headers().getAll(HttpHeaderNames.AUTHORIZATION);
        String token = headers.size() == 1 ? TokenAuthorization.parseTokenFromBearerTokenHeader(headers.get(0)) : "";
        for (TokenType type : tokens) {
            if (TokenAuthorization.checkTokenAuthorization(token, type)) {
                return;
            }
        }
        throw new RejectedException(
                        HttpResponseStatus.UNAUTHORIZED,
                        "Unauthorized",
                        "Token Authorization failed: the token is missing or invalid; send it in the header"
                                + " Authorization: Bearer TOKEN.")
                .with(HttpHeaderNames.WWW_AUTHENTICATE, "Bearer");
    }

    /** Extends the reservation to the size of this body. */
    private void reserve(long bytes) {
        if (bytes > maxBytes) {
            throw new RejectedException(
                    HttpResponseStatus.REQUEST_ENTITY_TOO_LARGE,
                    "TooLarge",
                    maxBytes > 0
                            ? "The request is larger than " + maxBytes + " bytes."
                            : "This API accepts no bodies.");
        }
        int more = Math.max((int) bytes - reservedBytes, 0);
        if (!Limits.IN_FLIGHT_BYTES.tryAcquire(more)) {
            throw new RejectedException(HttpResponseStatus.SERVICE_UNAVAILABLE, "Overloaded", Limits.EXCEEDED)
                    .with(HttpHeaderNames.RETRY_AFTER, "1");
        }
        reservedBytes += more;
    }

    @Override
    public void write(ChannelHandlerContext context, Object message, ChannelPromise promise) {
        if (Connection.isEndOfResponse(message)) {
            promise = promise.unvoid();
            promise.addListener(written -> release());
        }
        context.write(message, promise);
    }

    @Override
    public void channelInactive(ChannelHandlerContext context) {
        releaseWhenDone(context, Limits.RESPONSE_S);
        context.fireChannelInactive();
    }

    /** The request of a disconnected client stays in TorchServe's queue until TorchServe responds. */
    private void releaseWhenDone(ChannelHandlerContext context, int remainingSeconds) {
        if (reservedBytes > 0 && remainingSeconds > 0 && context.channel().attr(SESSION).get() != null) {
            context.executor().schedule(() -> releaseWhenDone(context, remainingSeconds - 1), 1, TimeUnit.SECONDS);
        } else {
            release();
        }
    }

    private void release() {
        Limits.IN_FLIGHT_BYTES.release(reservedBytes);
        reservedBytes = 0;
        receivedBytes = 0;
    }
}
